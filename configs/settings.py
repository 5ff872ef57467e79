"""What an operator may set: one frozen model for the whole service, read from a Serve config file's `args`.

Unknown keys and values out of range are refused by name. Times are in seconds (`_s`), sizes in bytes
(`_bytes`) or GiB (`_gib`). Engine arguments are handed to vLLM as they are; `actors.arguments` checks
their names against the installed vLLM.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

DEMO_MODEL = "demo"
"""The value of `model` that stands for the checkpoint embedded in `app.demo`."""

DEMO_MODEL_DIR = Path(__file__).resolve().parent.parent / "app" / "demo" / "model"
DEMO_SERVED_NAME = "tandem-demo"

RoleName = Literal["prefill", "decode"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


PEER_SECRET_VARIABLE = "TANDEM_PEER_SECRET"
API_KEYS_VARIABLE = "TANDEM_API_KEYS"

MIN_SECRET_CHARACTERS = 16


class SettingsError(ValueError):
    """A configuration that cannot be started; the message names each offending key."""


class Frozen(BaseModel):
    """Immutable, and a key it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HiddenText(str):
    """Text that is left out wherever whatever holds it is printed: vLLM logs its configuration."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'"


class PlacementSettings(Frozen):
    """Which Ray nodes (on Kubernetes: pods) may hold a deployment's replicas."""

    label_selector: dict[str, str] = Field(
        default_factory=dict, description="labels that a Ray node must have, such as `tandem/role: prefill`"
    )
    placement: Literal["any", "apart"] = Field(
        "any", description="any: wherever there is room; apart: at most one replica of this deployment on a Ray node"
    )

    @property
    def max_replicas_per_node(self) -> int | None:
        return 1 if self.placement == "apart" else None


class CpuSettings(Frozen):
    """How an engine without a GPU uses its host; ignored by roles with `num_gpus` > 0."""

    kv_cache_gib: int = Field(1, ge=1, description="KV cache of each engine worker (GiB)")
    omp_threads: int = Field(1, ge=1, description="OpenMP threads of each engine worker")
    threads_bind: str = Field("nobind", description="vLLM's thread binding: nobind, auto or lists of cores")

    def environment(self) -> dict[str, str]:
        return {
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": self.threads_bind,
            "OMP_NUM_THREADS": str(self.omp_threads),
        }


class TransferSettings(Frozen):
    """The KV connector's settings: its `kv_connector_extra_config`, under the connector's own names."""

    side_channel_host: str | None = Field(
        None, description="interface where prefill engines answer peers; unset: the address of the node"
    )
    side_channel_port: int = Field(0, ge=0, le=65535, description="0: any free port")
    advertise_host: str = Field("", description="how peers reach side_channel_host, where that is 0.0.0.0")
    secret: SecretStr | None = Field(
        None,
        min_length=MIN_SECRET_CHARACTERS,
        description="what all engines that exchange KV know and nobody else, at least 16 characters; better set in "
        f"the environment variable `{PEER_SECRET_VARIABLE}`, as Ray Serve logs `args`; unset: one of the Ray cluster's "
        "own",
    )
    backends: list[str] = Field(["UCX"], min_length=1, description="NIXL back ends")
    devices: list[str] = Field(
        [],
        description="network devices that UCX may use and listen on, in its words (`mlx5_0:1`, `eth0`); none given: "
        "all, or `lo` where side_channel_host is a loopback address",
    )
    integrity: Literal["auto", "full", "off"] = Field(
        "auto",
        description="full: decode compares digests of all KV that it fetches before it runs the request; off; "
        "auto: full where both KV caches lie in host memory, off elsewhere",
    )
    streaming: Literal["auto", "chunk", "layer"] = Field(
        "auto",
        description="chunk: KV leaves when a chunk of the prompt is computed; layer: that of the last chunk layer by "
        "layer; auto: whichever of the two has cost less so far",
    )
    trace_path: str = Field("", description="append a JSON line per transfer event to this file")
    handshake_s: Seconds = Field(30.0, description="first contact between two engines")
    progress_s: Seconds = Field(30.0, description="longest wait without hearing anything of a transfer")
    cancel_s: Seconds = Field(5.0, description="between two Cancels that the producer has not answered")
    lease_s: Seconds = Field(60.0, description="how long finished blocks wait for a decode engine to ask")
    alive_s: Seconds = Field(5.0, description="how often a producer that waits its turn says so")
    fence_s: Seconds = Field(2.0, description="how long a preempted prefill waits for writes in flight")
    host_gone_s: Seconds = Field(
        300.0, description="from Ray's word that a prefill engine's node is dead until its process is taken for ended"
    )

    @model_validator(mode="after")
    def _alive_is_heard(self) -> "TransferSettings":
        if self.alive_s * 2 > self.progress_s:
            raise ValueError("alive_s must be at most half of progress_s, or a busy producer is taken for dead")
        return self

    def connector_config(self, node_ip: str) -> dict[str, Any]:
        """`kv_connector_extra_config` on a node with the address `node_ip`."""
        return self.model_dump(exclude={"host_gone_s"}) | {
            "side_channel_host": self.side_channel_host or node_ip,
            "secret": HiddenText(self.secret.get_secret_value() if self.secret is not None else ""),
        }

    def operators_secret(self) -> SecretStr | None:
        """What the operator has set: here, or else in the environment."""
        if self.secret is not None:
            return self.secret
        found = os.environ.get(PEER_SECRET_VARIABLE)
        if not found:
            return None
        if len(found) < MIN_SECRET_CHARACTERS:
            raise SettingsError(f"{PEER_SECRET_VARIABLE}: must have at least {MIN_SECRET_CHARACTERS} characters")
        return SecretStr(found)


class RouterLimits(Frozen):
    """The router's deadlines and limits; Serve's `user_config` changes them while it runs."""

    request_timeout_s: Seconds = Field(600.0, description="from a request's arrival to its last byte")
    body_timeout_s: Seconds = Field(30.0, description="from a request's arrival to the end of its body")
    prefill_timeout_s: Seconds = Field(120.0, description="from a prefill leg's start to its answer")
    replica_timeout_s: Seconds = Field(10.0, description="wait for a decode replica with a free place")
    prefill_wait_s: Seconds = Field(1.0, description="the same for prefill; then decode serves alone")
    attempts: int = Field(
        3, ge=1, description="replicas of each role that a request may try when one after the other breaks"
    )
    silence_timeout_s: Seconds = Field(
        60.0,
        description="longest silence of a decode engine within a stream, and before it once prefill has answered; "
        "then another goes on",
    )
    health_timeout_s: Seconds = Field(5.0, description="wait for the engines' answers to /health")
    metrics_timeout_s: Seconds = Field(5.0, description="wait for the engines' answers to /metrics")
    retry_after_s: int = Field(1, ge=1, description="Retry-After of refusals under overload")
    max_ongoing_requests: int = Field(256, ge=1, description="requests in one router replica; more get 429")
    max_body_bytes: int = Field(8 * 2**20, ge=1, description="largest request body")
    max_prompts: int = Field(128, ge=1, description="prompts in one request, each counted `n` times")
    max_ongoing_requests_per_key: int = Field(
        256, ge=1, description="requests of one API key in one router replica; more get 429"
    )


class RouterSettings(RouterLimits, PlacementSettings):
    """The Router deployment."""

    replicas: int = Field(1, ge=1, description="routers behind the HTTP proxy")
    num_cpus: float = Field(0.1, ge=0, description="what the actor asks of Ray")
    resources: dict[str, float] = Field(default_factory=dict, description="custom Ray resources")
    otlp_traces_endpoint: str | None = Field(
        None,
        description="where OpenTelemetry spans are sent (OTLP over HTTP), such as `http://collector:4318/v1/traces`; "
        "unset: none are made. The engine argument of the same name is vLLM's, for the engines' own spans",
    )

    def limits(self) -> RouterLimits:
        return RouterLimits(**self.model_dump(include=set(RouterLimits.model_fields)))


class AuthSettings(Frozen):
    """Who may use the HTTP side."""

    api_keys: tuple[SecretStr, ...] = Field(
        (),
        description="send one of these as `Authorization: Bearer KEY`, but for /, /health and /metrics; better "
        f"set in the environment variable `{API_KEYS_VARIABLE}`, separated by commas; none: everybody may use it",
    )

    @field_validator("api_keys")
    @classmethod
    def _not_empty(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if not all(key.get_secret_value().strip() for key in keys):
            raise ValueError("a key must not be empty")
        return keys

    def operators_keys(self) -> tuple[SecretStr, ...]:
        """What the operator has set: here and in the environment."""
        found = (key.strip() for key in os.environ.get(API_KEYS_VARIABLE, "").split(","))
        return (*self.api_keys, *(SecretStr(key) for key in found if key))


class RoleSettings(PlacementSettings):
    """The Prefill or the Decode deployment."""

    replicas: int | dict[str, Any] = Field(1, description="a count, or Serve's autoscaling_config")
    tensor_parallel_size: int = Field(1, ge=1, description="ranks of one engine; the roles may differ")
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments of this role")
    frontend: dict[str, Any] = Field(
        default_factory=dict, description="arguments of vLLM's OpenAI layer, such as tool_call_parser"
    )
    num_cpus: float = Field(0.5, ge=0, description="what the actor asks of Ray")
    num_gpus: float = Field(0, ge=0, description="what the actor asks of Ray; 0 runs on the CPU")
    resources: dict[str, float] = Field(default_factory=dict, description="custom Ray resources")
    environment: dict[str, str] = Field(default_factory=dict, description="environment of the actor and its engine")
    max_ongoing_requests: int = Field(64, ge=1, description="requests in one replica")
    max_queued_requests: int = Field(128, ge=0, description="requests that wait in a router for a replica")
    start_attempts: int = Field(3, ge=1, description="failed starts after which the service gives up")
    drain_s: Seconds = Field(30.0, description="how long a stopping replica may finish its requests")

    @field_validator("replicas")
    @classmethod
    def _at_least_one(cls, replicas: int | dict[str, Any]) -> int | dict[str, Any]:
        if isinstance(replicas, int) and replicas < 1:
            raise ValueError("must be at least 1")
        return replicas


class ServiceSettings(Frozen):
    """Everything `app.main:build` takes."""

    model: str = Field(DEMO_MODEL, min_length=1, description="a path, a hub id, or `demo`")
    served_model_name: str | None = Field(None, description="the name clients use; unset: `model`, or `tandem-demo`")
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments of both roles")
    prefill: RoleSettings = Field(RoleSettings(), description="the engines that read prompts")
    decode: RoleSettings = Field(RoleSettings(), description="the engines that write answers")
    transfer: TransferSettings = Field(TransferSettings(), description="the KV connector")
    router: RouterSettings = Field(RouterSettings(), description="the HTTP side")
    auth: AuthSettings = Field(AuthSettings(), description="who may use the HTTP side")
    cpu: CpuSettings = Field(CpuSettings(), description="engines without a GPU")

    @model_validator(mode="after")
    def _one_engine_to_a_port(self) -> "ServiceSettings":
        if self.transfer.side_channel_port:
            for name, role in (("prefill", self.prefill), ("decode", self.decode)):
                if role.replicas != 1 and role.placement != "apart":
                    raise ValueError(
                        f"{name}.placement must be `apart`: two replicas on one node cannot share "
                        f"transfer.side_channel_port {self.transfer.side_channel_port}; 0 takes any free port"
                    )
        return self

    @property
    def model_path(self) -> str:
        """What vLLM loads."""
        return str(DEMO_MODEL_DIR) if self.model == DEMO_MODEL else self.model

    @property
    def model_name(self) -> str:
        """What clients write into `model`."""
        if self.served_model_name is not None:
            return self.served_model_name
        return DEMO_SERVED_NAME if self.model == DEMO_MODEL else self.model

    def role(self, name: RoleName) -> RoleSettings:
        return self.prefill if name == "prefill" else self.decode


def parse_settings(args: dict[str, Any]) -> ServiceSettings:
    """Settings from a config file's `args`; raises SettingsError with one line per offending key."""
    try:
        return ServiceSettings.model_validate(args)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, problem['loc']))}: {_advice(problem)}" for problem in error.errors()]
        raise SettingsError("\n".join(lines)) from None


def _advice(problem: Any) -> str:
    if problem["type"] == "extra_forbidden":
        return "no such setting"
    if problem["loc"][:2] in (("transfer", "secret"), ("auth", "api_keys")):
        return str(problem["msg"])
    return f"{problem['msg']} (got {problem['input']!r})"
