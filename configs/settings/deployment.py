"""Settings of deployments: replicas, resources, placement, addresses, CPU engines and TLS."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from configs.settings.base import Frozen, Seconds


class PlacementSettings(Frozen):
    """Ray nodes (on Kubernetes: pods) that may hold a deployment's replicas, also the router's."""

    label_selector: dict[str, str] = Field(
        default_factory=dict, description="labels that a Ray node must have, for example `tandem/role: prefill`"
    )
    placement: Literal["any", "apart"] = Field(
        "any",
        description="any: spread over Ray nodes, or packed with RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1 for Serve's "
        "controller and no executor `ray`; apart: at most one replica of this deployment per node",
    )

    def spreading_options(self) -> dict[str, Any]:
        """Return Serve's `max_replicas_per_node` for `placement: apart`, else no option.

        `serve build` does not accept the value `None` for it.
        """
        return {"max_replicas_per_node": 1} if self.placement == "apart" else {}


class RoleSettings(PlacementSettings):
    """Settings of the Prefill or the Decode deployment."""

    replicas: int | dict[str, Any] = Field(
        1,
        description="a number, or Serve's `autoscaling_config`; `autoscaling_policy` (below) scales both roles "
        "together",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="number of tensor-parallel ranks of one engine, or of each of its data-parallel ranks; the roles "
        "may differ",
    )
    data_parallel_size: int = Field(
        1,
        ge=1,
        description="number of data-parallel ranks of one replica, for models with experts: each is an engine for "
        "the router, and all end together. For other models use `replicas`. With GPUs, set `num_gpus` to the product "
        "of both sizes",
    )
    executor: Literal["mp", "ray"] = Field(
        "mp",
        description="mp: ranks are processes of the actor, on one node; ray: ranks are Ray actors with one GPU each, "
        "for engines larger than a node",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments of this role")
    num_cpus: float = Field(0.5, ge=0, description="CPUs that the actor requests from Ray")
    num_gpus: float = Field(
        0,
        ge=0,
        description="GPUs of one replica, requested from Ray; 0: run on the CPU. The engine's arguments follow `args`, "
        "so a change from or to 0 must be in `args`",
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources that the actor requests"
    )
    environment: dict[str, str] = Field(
        default_factory=dict, description="environment variables of the actor and its engine"
    )
    max_ongoing_sequences: int | None = Field(
        None,
        ge=1,
        description="slots of one replica, or of each of its data-parallel ranks: sequences (prompts times `n`) that "
        "it computes or queues. Unset: twice the engine's `max_num_seqs`, but no more than its KV cache has blocks",
    )
    max_queued_requests: int = Field(
        65536,
        ge=0,
        description="requests that may wait in one router for a slot of this role; further ones get 429 (decode) or "
        "are served by decode alone (prefill)",
    )
    rpc_host: str | None = Field(
        None,
        description="address on which an engine's RPC server listens and which routers call; unset: the address of the "
        "node",
    )
    rpc_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of an engine's RPC server; 0: any free port. Data-parallel rank r listens on `rpc_port` + r",
    )
    start_attempts: int = Field(
        3,
        ge=1,
        description="failed starts in a row after which the deployment fails; three per replica if that is fewer. "
        "After a failed update, Serve starts no replica of this role until the next `serve deploy`",
    )
    drain_s: Seconds = Field(30.0, description="time for which a stopping replica may finish its requests")

    @model_validator(mode="after")
    def _ranks_have_gpus_to_themselves(self) -> "RoleSettings":
        if self.executor == "ray":
            if self.data_parallel_size > 1:
                raise ValueError(
                    "data_parallel_size must be 1 for executor `ray`: the data-parallel ranks of a replica are "
                    "processes of its actor; use executor `mp`"
                )
            if self.num_gpus != self.tensor_parallel_size:
                raise ValueError(
                    f"executor `ray` needs one GPU for each rank: set num_gpus to tensor_parallel_size, "
                    f"{self.tensor_parallel_size}, instead of {self.num_gpus:g}"
                )
            if self.placement == "apart":
                raise ValueError("placement must be `any` for executor `ray`: `apart` counts replicas, not their ranks")
        return self

    @property
    def scaled(self) -> bool:
        """True if the autoscaler chooses the number of replicas."""
        return not isinstance(self.replicas, int)

    @field_validator("replicas")
    @classmethod
    def _at_least_one(cls, replicas: int | dict[str, Any]) -> int | dict[str, Any]:
        if isinstance(replicas, int) and replicas < 1:
            raise ValueError("must be at least 1")
        return replicas


class CpuSettings(Frozen):
    """Host resources of each worker of an engine without a GPU.

    Ignored for roles with `num_gpus` > 0.
    """

    kv_cache_gib: int = Field(1, ge=1, description="KV cache of each engine worker (GiB)")
    omp_threads: int = Field(1, ge=1, description="OpenMP threads of each engine worker")
    threads_bind: str = Field("nobind", description="vLLM's thread binding: nobind, auto or lists of cores")

    def environment(self) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": self.threads_bind,
            "OMP_NUM_THREADS": str(self.omp_threads),
        }


class RpcTlsSettings(Frozen):
    """TLS certificates for the connections between routers and engines."""

    certfile: str = Field(min_length=1, description="PEM file with the certificate chain, on the node of each replica")
    keyfile: str = Field(min_length=1, description="PEM file with the unencrypted key of `certfile`")
    ca_certs: str = Field(min_length=1, description="PEM file with the authorities of the other side's certificates")
