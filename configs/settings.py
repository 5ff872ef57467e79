"""Settings of the service: one frozen model, read from the `args` of a Serve config file.

Errors name each unknown key and each value out of range. Times are in seconds (`_s`), sizes in
bytes (`_bytes`), MiB (`_mib`) or GiB (`_gib`). Tandem passes engine arguments to vLLM unchanged;
`actors.engine.arguments` checks their names against the installed vLLM.
"""

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

DEMO_MODEL = "demo"
"""Value of `model` for the checkpoint embedded in `app.demo`."""

DEMO_MODEL_DIR = Path(__file__).resolve().parent.parent / "app" / "demo" / "model"
DEMO_SERVED_NAME = "tandem-demo"

RoleName = Literal["prefill", "decode"]

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


BEAT_S = 5.0
"""Interval in seconds of the heartbeats that an engine sends to routers during open calls."""

PEER_SECRET_VARIABLE = "TANDEM_PEER_SECRET"
API_KEYS_VARIABLE = "TANDEM_API_KEYS"
VLLM_API_KEY_VARIABLE = "VLLM_API_KEY"

MIN_SECRET_CHARACTERS = 16

LAST_PORT = 65535

UNNAMEABLE = re.compile("[^A-Za-z0-9._-]")
"""Characters of a model's name that become `-` in the names of its deployments."""

MIN_ONGOING_SEQUENCES = 4096
"""Minimum of a router's default `max_ongoing_sequences`."""


class SettingsError(ValueError):
    """An invalid configuration; the message names each invalid key."""


class Frozen(BaseModel):
    """Base of immutable models without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HiddenText(str):
    """Text with a masked `repr`, because vLLM logs its configuration."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'**********'"


class PlacementSettings(Frozen):
    """Ray nodes (on Kubernetes: pods) that may hold a deployment's replicas."""

    label_selector: dict[str, str] = Field(
        default_factory=dict, description="labels that a Ray node must have, for example `tandem/role: prefill`"
    )
    placement: Literal["any", "apart"] = Field(
        "any",
        description="any: spread over Ray nodes, or packed if Serve's controller has "
        "RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1; apart: at most one replica of this deployment per node",
    )

    def spreading_options(self) -> dict[str, Any]:
        """Return Serve's `max_replicas_per_node` for `placement: apart`, else no option.

        `serve build` does not accept the value `None` for it.
        """
        return {"max_replicas_per_node": 1} if self.placement == "apart" else {}


class CpuSettings(Frozen):
    """Host resources of an engine without a GPU; ignored for roles with `num_gpus` > 0."""

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
    """Settings of the KV connector, named like the keys of its `kv_connector_extra_config`."""

    side_channel_host: str | None = Field(
        None, description="interface of the side channel; unset: the address of the node"
    )
    side_channel_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of the side channel; 0: any free port. Data-parallel rank r listens on `side_channel_port` "
        "+ r",
    )
    advertise_host: str = Field(
        "", description="address under which peers reach the side channel, if side_channel_host is 0.0.0.0"
    )
    secret: SecretStr | None = Field(
        None,
        min_length=MIN_SECRET_CHARACTERS,
        description="secret of all engines that exchange KV, at least 16 characters; prefer the environment variable "
        f"`{PEER_SECRET_VARIABLE}`, because Ray Serve logs `args`; unset: generated for the Ray cluster",
    )
    backends: list[str] = Field(["UCX"], min_length=1, description="NIXL backends")
    devices: list[str] = Field(
        [],
        description="network devices that UCX may use and listen on, by UCX's names (`mlx5_0:1`, `eth0`); empty: all "
        "if the node has RDMA devices, else the interface with the address side_channel_host",
    )
    integrity: Literal["auto", "full", "off"] = Field(
        "auto",
        description="full: decode compares digests of all bytes moved before it runs the request, computed on the "
        "device that holds the KV; off: no digests; auto: same as full",
    )
    streaming: Literal["auto", "chunk", "layer"] = Field(
        "auto",
        description="chunk: prefill sends KV after each chunk of the prompt; layer: it also sends the last chunk layer "
        "by layer; auto: the measured cheaper one",
    )
    trace_path: str = Field("", description="file to which each transfer event is appended as a JSON line; empty: none")
    handshake_s: Seconds = Field(30.0, description="deadline of first contact between two engines")
    progress_s: Seconds = Field(30.0, description="longest silence of a transfer before the consumer cancels it")
    cancel_s: Seconds = Field(
        5.0,
        description="timeout for the answer to a cancellation; then decode quarantines the request's blocks, computes "
        "the request in other blocks, and repeats the cancellation",
    )
    lease_s: Seconds = Field(60.0, description="time for which prefill holds finished blocks for an offer of decode")
    alive_s: Seconds = Field(
        5.0, description="interval of the heartbeat of a queued or computing transfer; at most half of progress_s"
    )
    step_s: Seconds = Field(
        300.0,
        description="time without a finished step after which a prefill engine with work stops its heartbeat, so that "
        "decode computes the prompt; set it no lower than `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` (300), after which vLLM "
        "ends an engine",
    )
    fence_s: Seconds = Field(
        2.0, description="timeout for writes in flight of a preempted prefill request, in host memory"
    )
    forget_s: float = Field(
        3600.0,
        ge=1800.0,
        allow_inf_nan=False,
        description="silence after which prefill forgets a decode worker and closes its connection; decode forgets an "
        "unused prefill engine after half of it",
    )
    node_lost_s: Seconds = Field(
        300.0, description="grace period after Ray marks a node dead before its engines' writes are presumed stopped"
    )

    @model_validator(mode="after")
    def _alive_is_heard(self) -> "TransferSettings":
        if self.alive_s * 2 > self.progress_s:
            raise ValueError("alive_s must be at most half of progress_s, or decode cancels transfers of busy engines")
        return self

    def connector_config(self, node_ip: str) -> dict[str, Any]:
        """Return `kv_connector_extra_config` for a node with the address `node_ip`."""
        return self.model_dump(exclude={"node_lost_s"}) | {
            "side_channel_host": self.side_channel_host or node_ip,
            "secret": HiddenText(self.secret.get_secret_value() if self.secret is not None else ""),
        }

    def operators_secret(self) -> SecretStr | None:
        """Return the operator's secret from these settings or the environment, or None.

        Raises SettingsError if the secret in the environment is too short.
        """
        if self.secret is not None:
            return self.secret
        found = os.environ.get(PEER_SECRET_VARIABLE)
        if not found:
            return None
        if len(found) < MIN_SECRET_CHARACTERS:
            raise SettingsError(f"{PEER_SECRET_VARIABLE}: must have at least {MIN_SECRET_CHARACTERS} characters")
        return SecretStr(found)


class KVStoreSettings(Frozen):
    """Settings of the KV store, which is disabled unless `path` or `memory_gib` is set."""

    path: str = Field(
        "", description="folder on a local disk of each engine's node, for the store alone; empty: no disk tier"
    )
    disk_gib: Positive = Field(64.0, description="bytes below `path`, of all engines that share it (GiB)")
    memory_gib: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="host memory of all engines of a node (GiB); 0: no memory tier"
    )
    memory_path: str = Field("/dev/shm/tandem-kv-store", description="folder on a tmpfs that holds the memory tier")
    chunk_tokens: int = Field(
        256,
        ge=1,
        description="tokens of one object. States are stored only if a step ends at a multiple of it: for a model with "
        "states, set `max_num_batched_tokens` or `long_prefill_token_threshold` to the same value",
    )
    staging_mib: int = Field(
        256, ge=1, description="shared memory of each engine between files and KV blocks (MiB), in `/dev/shm`"
    )
    lookup_s: Seconds = Field(
        0.02, description="timeout of a lookup, which then counts as a miss, and of a read that delivers nothing"
    )
    load_s: Seconds = Field(2.0, description="timeout for reading and verifying objects; the engine ignores late ones")
    store_s: Seconds = Field(30.0, description="timeout for writing an object, which is then dropped")

    @model_validator(mode="after")
    def _paths_are_absolute(self) -> "KVStoreSettings":
        for key in ("path", "memory_path"):
            folder = getattr(self, key)
            if folder and not Path(folder).is_absolute():
                raise ValueError(f"{key} must be an absolute path, not {folder!r}")
        return self

    @property
    def enabled(self) -> bool:
        return bool(self.path or self.memory_gib)

    def connector_config(self) -> dict[str, Any]:
        """Return the store's part of `kv_connector_extra_config`; empty if it is disabled."""
        return {"store": self.model_dump()} if self.enabled else {}


class RoutingSettings(Frozen):
    """Settings of the routing policy, which `user_config` can change while engines run.

    The router keeps its measurements unless an assumption (`assumed_*`) changes.
    """

    policy: Literal["cost", "least_load", "round_robin", "always_remote", "never_remote"] = Field(
        "cost",
        description="cost: the cheapest of decode alone and all pairs; always_remote: the cheapest pair; never_remote: "
        "the cheapest decode replica; least_load, round_robin: a pair if there is one, each role separately",
    )
    local_below_tokens: int = Field(
        32, ge=0, description="policy cost: decode computes prompts with fewer uncached tokens"
    )
    decode_weight: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of a second of decoding, relative to a second before the first token",
    )
    interference_weight: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of a second by which this request delays other streams",
    )
    session_header: str = Field(
        "x-session-id",
        pattern="^[a-z0-9-]+$",
        description="requests with the same value of this header go to the same decode replica while it has a slot",
    )
    prefix_tokens_per_engine: int = Field(
        1_000_000, ge=0, description="prompt tokens that the router assumes to be cached per engine; 0: none"
    )
    fades_s: Seconds = Field(600.0, description="time constant of the exponential decay of measurements")
    assumed_prefill_overhead_s: Seconds = Field(
        0.02, description="assumed until measured: duration of a prefill without tokens"
    )
    assumed_prefill_tokens_per_s: Positive = Field(
        10_000.0, description="assumed until measured: rate of uncached prompt tokens"
    )
    assumed_handover_s: Seconds = Field(0.02, description="assumed until measured: handover without tokens to move")
    assumed_transfer_tokens_per_s: Positive = Field(
        200_000.0, description="assumed until measured: rate at which tokens' KV moves after the prompt was computed"
    )
    assumed_step_s: Seconds = Field(0.02, description="assumed until measured: duration of a decode step")
    assumed_bytes_per_token: Positive = Field(4.0, description="assumed until measured: bytes of text per token")
    assumed_answer_tokens: int = Field(128, ge=1, description="assumed until measured: tokens of an answer")


class RouterLimits(Frozen):
    """The router's deadlines and limits; Serve's `user_config` changes them while it runs."""

    request_timeout_s: Seconds = Field(
        3600.0, description="deadline from a request's arrival to its whole answer, if the answer is not streamed"
    )
    first_token_timeout_s: Seconds = Field(
        600.0, description="deadline from the arrival of a streaming request to its first token, slot wait included"
    )
    idle_timeout_s: Seconds = Field(
        300.0,
        description="longest time between two tokens of a stream, and longest time in which its client reads nothing; "
        "the only deadline of a stream after its first token",
    )
    keep_alive_s: Seconds | None = Field(
        10.0,
        description="a stream without a token after this time gets status 200, headers and an SSE comment, and further "
        "comments at this interval until its first token; less than a load balancer's idle timeout. `null`: nothing is "
        "sent before the first token ([errors](http-api.md#errors))",
    )
    body_timeout_s: Seconds = Field(30.0, description="deadline from a request's arrival to the end of its body")
    prefill_timeout_s: Seconds = Field(120.0, description="deadline from a prefill leg's start to its answer")
    replica_timeout_s: Seconds = Field(
        10.0,
        description="longest wait for a decode replica while none runs, or while all running ones have failed the "
        "request. The wait for a slot on a busy replica ends at the request's deadline",
    )
    prefill_wait_s: Seconds = Field(
        1.0, description="longest wait for a slot on a prefill replica; then decode serves the request alone"
    )
    attempts: int = Field(3, ge=1, description="largest number of replicas of each role that a failing request tries")
    silence_timeout_s: Seconds = Field(
        60.0,
        ge=3 * BEAT_S,
        description="longest silence of a decode engine with an open request; then another engine takes over. Engines "
        f"send a heartbeat every {BEAT_S:g} s, between two steps, also for queued requests",
    )
    metrics_timeout_s: Seconds = Field(5.0, description="longest wait for the engines' answers to /metrics")
    retry_after_s: int = Field(1, ge=1, description="`Retry-After` of 429 and 503 responses, in seconds")
    max_ongoing_sequences: int | None = Field(
        None,
        ge=1,
        description="sequences (prompts times `n`) in one router replica; further requests get 429. Unset: four for "
        f"each slot of the decode engines, at least {MIN_ONGOING_SEQUENCES:,}",
    )
    max_body_bytes: int = Field(
        32 * 2**20, ge=1, description="largest request body, with its images; larger ones get 413"
    )
    max_prompts: int = Field(128, ge=1, description="largest number of prompts times `n` in one request")
    max_ongoing_requests_per_key: int | None = Field(
        None,
        ge=1,
        description="requests of one API key in one router replica; further ones get 429. Unset: half of the "
        "router's limit, or no limit of its own if there is only one key",
    )
    client_priority: bool = Field(
        False,
        description="pass `X-Vllm-Priority` of clients to the engines, which use it with the engine argument "
        "`scheduling_policy: priority`; false: drop it",
    )
    first_token: Literal["prefill", "decode"] = Field(
        "decode",
        description="engine that samples the first token of a stream, or answers a request for one token, with a "
        "remote route. prefill: the client receives it before the KV has moved, where this is exact "
        "([HTTP API](http-api.md#first-token)); decode: always decode",
    )
    routing: RoutingSettings = Field(RoutingSettings(), description="routing policy")


class RouterSettings(RouterLimits, PlacementSettings):
    """Settings of the Router deployment."""

    replicas: int = Field(1, ge=1, description="number of router replicas")
    http_port: int | None = Field(
        8100,
        ge=1,
        le=65535,
        description="port on which each router answers clients; routers on one node share it. `null`: only Ray "
        "Serve's proxy answers (`http_options`), which is slower (docs/router-cost.md)",
    )
    leave_s: Seconds = Field(
        1.0,
        description="time for which a stopping router still accepts connections on `http_port`, asks clients to "
        "reconnect, and returns 503 on `/tandem/service`; longer than a load balancer's check interval",
    )
    http_host: str = Field("127.0.0.1", description="interface of `http_port`; `0.0.0.0`: all interfaces of the node")
    ssl_certfile: str | None = Field(
        None,
        description="PEM file with the certificate chain of `http_port`, on each router's node; unset: no TLS. Changed "
        "files are used from the next connection on ([TLS](operations.md#tls))",
    )
    ssl_keyfile: str | None = Field(None, description="PEM file with the unencrypted key of `ssl_certfile`")
    ssl_ca_certs: str | None = Field(
        None,
        description="PEM file with the authorities of client certificates. Set: clients need a certificate, except "
        "for /, /health, /ping, /load, /metrics and /tandem/service",
    )
    num_cpus: float = Field(0.1, ge=0, description="CPUs that the actor requests of Ray")
    resources: dict[str, float] = Field(default_factory=dict, description="custom Ray resources")
    drain_s: Seconds = Field(30.0, description="time for which a stopping router may finish its requests")
    access_log: bool = Field(
        True,
        description="write a JSON line per request to `access-<replica>.log` in the Ray session's log directory "
        "([fields](observing.md#access-log))",
    )
    request_log: Literal["off", "parameters", "text"] = Field(
        "off",
        description="add the body of each request to its line of the access log: `parameters` with lengths instead of "
        "texts, `text` as it was sent, prompts included ([fields](observing.md#access-log))",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description='origins of web pages that may call `http_port` (CORS), for example `["https://chat.example"]`; '
        '`["*"]`: all, which is the default of `vllm serve`',
    )
    allowed_methods: list[str] = Field(default_factory=lambda: ["*"], description="methods for these origins")
    allowed_headers: list[str] = Field(default_factory=lambda: ["*"], description="request headers for these origins")
    allow_credentials: bool = Field(False, description="whether these origins may send cookies")
    otlp_traces_endpoint: str | None = Field(
        None,
        description="OTLP/HTTP endpoint of the router's spans, for example `http://collector:4318/v1/traces`; unset: "
        "no spans. The engine argument of the same name is vLLM's, for the engines' own spans",
    )

    @model_validator(mode="after")
    def _tls_is_complete(self) -> "RouterSettings":
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile must be set together")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("ssl_ca_certs needs ssl_certfile and ssl_keyfile")
        if self.ssl_certfile is not None and self.http_port is None:
            raise ValueError("ssl_certfile needs http_port; Ray Serve's proxy has TLS settings of its own")
        return self

    def limits(self) -> RouterLimits:
        return RouterLimits(**self.model_dump(include=set(RouterLimits.model_fields)))


class AuthSettings(Frozen):
    """Authentication of HTTP clients."""

    api_keys: tuple[SecretStr, ...] = Field(
        (),
        description="accepted keys (`Authorization: Bearer KEY`); prefer the environment variable "
        f"`{API_KEYS_VARIABLE}`, separated by commas, or `{VLLM_API_KEY_VARIABLE}`; none: no authentication. "
        "/, /health, /ping, /load and /metrics need no key",
    )

    @field_validator("api_keys")
    @classmethod
    def _can_be_sent(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        return tuple(SecretStr(_sendable_key(key.get_secret_value())) for key in keys)

    def operators_keys(self) -> tuple[SecretStr, ...]:
        """Return the operator's API keys from these settings and this process's environment.

        Raises SettingsError if a variable has a key that no client can send, or is set without any.
        """
        listed = _keys_in(API_KEYS_VARIABLE, os.environ.get(API_KEYS_VARIABLE, "").split(","))
        single = _keys_in(VLLM_API_KEY_VARIABLE, [os.environ.get(VLLM_API_KEY_VARIABLE, "")])
        return (*self.api_keys, *map(SecretStr, (*listed, *single)))


def _keys_in(variable: str, values: Sequence[str]) -> list[str]:
    """Return the keys in the `values` of an environment variable, without surrounding blanks.

    Raises SettingsError if no client can send a key, or if the variable is set without any.
    """
    try:
        found = [_sendable_key(key) for key in values if key.strip()]
    except ValueError as error:
        raise SettingsError(f"{variable}: {error}") from None
    if not found and list(values) != [""]:
        raise SettingsError(f"{variable}: is set, but contains no key; unset it to admit all clients")
    return found


def _sendable_key(key: str) -> str:
    """Return `key` without surrounding blanks.

    Raises ValueError, without the key in its message, if no client can send the key in a header.
    """
    key = key.strip()
    if not key:
        raise ValueError("a key must not be empty")
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(
            "a key must be printable ASCII without blanks, or no client can send it in a header; "
            "`openssl rand -hex 24` makes one"
        )
    return key


class RoleSettings(PlacementSettings):
    """Settings of the Prefill or the Decode deployment."""

    replicas: int | dict[str, Any] = Field(
        1,
        description="a number, or Serve's `autoscaling_config`; `autoscaling_policy` (below) scales both roles "
        "together",
    )
    tensor_parallel_size: int = Field(1, ge=1, description="number of ranks of one engine; the roles may differ")
    data_parallel_size: int = Field(
        1,
        ge=1,
        description="number of data-parallel ranks of one replica, each of `tensor_parallel_size` ranks, for models "
        "with experts. Requests are routed to a rank, as to an engine of its own; all ranks end together. For other "
        "models use `replicas`. Set `num_gpus` to the product of both sizes",
    )
    executor: Literal["mp", "ray"] = Field(
        "mp",
        description="mp: ranks are processes of the actor, on one node; ray: ranks are Ray actors with one GPU each, "
        "on as few nodes as have room, for engines larger than a node",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments of this role")
    num_cpus: float = Field(0.5, ge=0, description="CPUs that the actor requests of Ray")
    num_gpus: float = Field(0, ge=0, description="GPUs that the actor requests of Ray; 0: run on the CPU")
    resources: dict[str, float] = Field(default_factory=dict, description="custom Ray resources")
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
        None, description="interface of an engine's RPC server, which routers call; unset: the address of the node"
    )
    rpc_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of an engine's RPC server; 0: any free port. Data-parallel rank r listens on `rpc_port` + r",
    )
    start_attempts: int = Field(3, ge=1, description="failed starts after which the deployment fails")
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
                    f"executor `ray` needs num_gpus = tensor_parallel_size, a GPU for each rank, not "
                    f"{self.num_gpus:g} for {self.tensor_parallel_size}"
                )
            if self.placement == "apart":
                raise ValueError("placement `apart` is not for executor `ray`: Serve counts replicas, not their ranks")
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


class RpcTlsSettings(Frozen):
    """TLS certificates for the connections between routers and engines."""

    certfile: str = Field(min_length=1, description="PEM file with the certificate chain, on the node of each replica")
    keyfile: str = Field(min_length=1, description="PEM file with its unencrypted key")
    ca_certs: str = Field(min_length=1, description="PEM file with the authorities of the other side's certificates")


class ScalingSettings(Frozen):
    """Arguments (`policy_kwargs`) of the policy that scales both roles; a key beside `args`."""

    prefill_busy: float = Field(
        0.7, gt=0, le=1, description="target fraction of time in which prefill engines compute, at their measured rate"
    )
    catch_up_s: Seconds = Field(10.0, description="time in which queued prompt tokens should be computed")
    kv_use: float = Field(0.7, gt=0, le=1, description="target fraction of decode engines' KV cache in use")
    tpot_s: Seconds | None = Field(
        None,
        description="target for the mean time per output token on decode engines, well below the objective; unset: "
        "only the KV cache counts",
    )
    slack: float = Field(
        0.15, ge=0, lt=1, description="an engine is removed if the remaining engines could serve this much more load"
    )
    fewest_prefill_per_decode: float = Field(
        0.25,
        gt=0,
        allow_inf_nan=False,
        description="fewest prefill engines per decode engine; below it the autoscaler adds prefill engines",
    )
    most_prefill_per_decode: float = Field(
        4.0,
        gt=0,
        allow_inf_nan=False,
        description="most prefill engines per decode engine; above it the autoscaler adds decode engines",
    )

    @model_validator(mode="after")
    def _ratio_leaves_room(self) -> "ScalingSettings":
        if self.most_prefill_per_decode < self.fewest_prefill_per_decode:
            raise ValueError("most_prefill_per_decode must not be below fewest_prefill_per_decode")
        return self


class ModelSettings(Frozen):
    """Settings of one model and its engines."""

    model: str = Field(DEMO_MODEL, min_length=1, description="a path, a hub id, or `demo` (the embedded model)")
    served_model_name: str | list[str] | None = Field(
        None,
        description="model name in the API, or a list: the name and its aliases; unset: `model`, or `tandem-demo`",
    )
    engine: dict[str, Any] = Field(default_factory=dict, description="vLLM engine arguments of both roles")
    frontend: dict[str, Any] = Field(
        default_factory=dict,
        description="arguments of vLLM's OpenAI layer, for example `tool_call_parser`, of both roles, because both "
        "render the prompt. Those of vLLM's HTTP server are refused ([where they "
        "are](coming-from-vllm-serve.md#where-each-argument-goes))",
    )
    allow_runtime_lora_updating: bool = Field(
        False,
        description="serve `/v1/load_lora_adapter` and `/v1/unload_lora_adapter` "
        "([adapters](http-api.md#adapters)); needs `engine.enable_lora`. Any client with an API key can then make "
        "engines read any path",
    )
    prefill: RoleSettings = Field(RoleSettings(), description="the Prefill deployment")
    decode: RoleSettings = Field(RoleSettings(), description="the Decode deployment")

    @field_validator("served_model_name")
    @classmethod
    def _distinct_names(cls, names: str | list[str] | None) -> str | list[str] | None:
        if isinstance(names, list) and (not names or len(set(names)) < len(names)):
            raise ValueError("must have at least one name, and each only once")
        return names

    @property
    def model_path(self) -> str:
        """Path or hub id of the model for vLLM."""
        return str(DEMO_MODEL_DIR) if self.model == DEMO_MODEL else self.model

    @property
    def model_names(self) -> tuple[str, ...]:
        """Model name in client requests, and its aliases."""
        if isinstance(self.served_model_name, list):
            return tuple(self.served_model_name)
        if self.served_model_name is not None:
            return (self.served_model_name,)
        return (DEMO_SERVED_NAME if self.model == DEMO_MODEL else self.model,)

    @property
    def model_name(self) -> str:
        """Model name in client requests."""
        return self.model_names[0]

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """Names of the adapters that `frontend.lora_modules` loads at the start."""
        modules = self.frontend.get("lora_modules") or ()
        return tuple(str(one["name"]) for one in modules if isinstance(one, dict) and "name" in one)

    def role(self, name: RoleName) -> RoleSettings:
        return self.prefill if name == "prefill" else self.decode


class ServiceSettings(ModelSettings):
    """All settings of the service: the argument of `app.main:build`."""

    models: list[ModelSettings] = Field(
        default_factory=list,
        description="several models behind one endpoint ([several models](#several-models)): a list of the keys "
        "above, which then must not be set here",
    )
    transfer: TransferSettings = Field(TransferSettings(), description="the KV connector")
    store: KVStoreSettings = Field(KVStoreSettings(), description="the KV store; off by default")
    router: RouterSettings = Field(RouterSettings(), description="the Router deployment")
    auth: AuthSettings = Field(AuthSettings(), description="API keys")
    rpc_tls: RpcTlsSettings | None = Field(
        None,
        description="mutual TLS between routers and engines: `certfile`, `keyfile` and `ca_certs`, PEM files on the "
        "node of each replica. Both sides present the certificate. Changed files are used from the next connection on "
        "([TLS](operations.md#tls))",
    )
    cpu: CpuSettings = Field(CpuSettings(), description="engines without a GPU; ignored by roles with `num_gpus`")

    @model_validator(mode="after")
    def _one_form(self) -> "ServiceSettings":
        both = sorted(self.model_fields_set & ModelSettings.model_fields.keys())
        if self.models and both:
            raise ValueError(f"{', '.join(both)}: set these for each of `models`, not at the top level")
        return self

    @model_validator(mode="after")
    def _names_are_distinct(self) -> "ServiceSettings":
        names = [name for one in self.models for name in (*one.model_names, *one.adapter_names)]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"models: {', '.join(twice)}: only one model or adapter may have this name")
        if len(self.each_model()) < len(self.models):
            raise ValueError(
                "models: names that differ only in characters other than letters, digits and `._-` give two "
                "deployments one name; rename one of the models"
            )
        return self

    @model_validator(mode="after")
    def _one_engine_to_a_port(self) -> "ServiceSettings":
        for name, role in self._roles():
            fixed = {"transfer.side_channel_port": self.transfer.side_channel_port, f"{name}.rpc_port": role.rpc_port}
            for setting, port in fixed.items():
                if port and role.replicas != 1 and role.placement != "apart":
                    raise ValueError(
                        f"{name}.placement must be `apart`: two replicas on one node cannot share "
                        f"{setting} {port}; 0 takes any free port"
                    )
                if port and port + role.data_parallel_size - 1 > LAST_PORT:
                    raise ValueError(
                        f"{name}.data_parallel_size: rank {role.data_parallel_size - 1} would listen on port "
                        f"{port + role.data_parallel_size - 1}; choose a lower {setting}, or 0 for any free port"
                    )
        return self

    @model_validator(mode="after")
    def _ranks_without_a_store(self) -> "ServiceSettings":
        for name, role in self._roles():
            if role.data_parallel_size > 1 and self.store.enabled:
                raise ValueError(
                    f"{name}.data_parallel_size must be 1 with a KV `store`: the combination is not tested"
                )
        return self

    def _roles(self) -> list[tuple[str, RoleSettings]]:
        """Return the roles of all models, each with its key in a configuration."""
        roles: tuple[RoleName, ...] = get_args(RoleName)
        if not self.models:
            return [(role, self.role(role)) for role in roles]
        return [(f"models.{i}.{role}", one.role(role)) for i, one in enumerate(self.models) for role in roles]

    def each_model(self) -> dict[str, "ServiceSettings"]:
        """Return the settings of each model in the form of a service with one model.

        Each key is the suffix of the model's deployment names: `-NAME`, or empty without `models`.
        """
        if not self.models:
            return {"": self}
        fields = ModelSettings.model_fields
        return {
            f"-{UNNAMEABLE.sub('-', one.model_name)}": self.model_copy(
                update={"models": [], **{name: getattr(one, name) for name in fields}}
            )
            for one in self.models
        }

    def with_secret(self, fallback: SecretStr) -> "ServiceSettings":
        """Return these settings with the operator's secret, or with `fallback` if there is none."""
        secret = self.transfer.operators_secret() or fallback
        return self.model_copy(update={"transfer": self.transfer.model_copy(update={"secret": secret})})


def parse_settings(args: dict[str, Any]) -> ServiceSettings:
    """Return the settings in a config file's `args`.

    Raises SettingsError with one line per invalid key.
    """
    try:
        return ServiceSettings.model_validate(args)
    except ValidationError as error:
        raise _settings_error(error, ServiceSettings) from None


def parse_scaling(policy_kwargs: dict[str, Any]) -> ScalingSettings:
    """Return the settings in `policy_kwargs`.

    Raises SettingsError with one line per invalid key.
    """
    try:
        return ScalingSettings.model_validate(policy_kwargs)
    except ValidationError as error:
        raise _settings_error(error, ScalingSettings) from None


def changed_limits(built: RouterLimits, user_config: Any) -> RouterLimits:
    """Return `built` with the values of `user_config`.

    Raises SettingsError with one line per invalid key.
    """
    if not isinstance(user_config, dict):
        raise SettingsError(f"user_config must be a mapping (got {user_config!r})")
    fixed = [key for key in user_config if key in RouterSettings.model_fields.keys() - RouterLimits.model_fields.keys()]
    if fixed:
        raise SettingsError(
            "\n".join(f"{key}: cannot change while the router runs; change it in `args`" for key in fixed)
        )
    routing = user_config.get("routing")
    merged = built.model_dump() | user_config
    if isinstance(routing, dict):
        merged["routing"] = built.routing.model_dump() | routing
    try:
        return RouterLimits.model_validate(merged)
    except ValidationError as error:
        raise _settings_error(error, RouterLimits) from None


def _settings_error(error: ValidationError, model: type[BaseModel]) -> SettingsError:
    lines = [f"{'.'.join(map(str, problem['loc']))}: {_advice(problem, model)}" for problem in error.errors()]
    return SettingsError("\n".join(lines))


def _advice(problem: Any, model: type[BaseModel]) -> str:
    if problem["type"] == "extra_forbidden":
        *path, key = problem["loc"]
        if path and key == "frontend":
            return "set `frontend` of the service: both roles render the prompt"
        close = difflib.get_close_matches(str(key), _keys(model, path), n=1)
        return f"no such setting; did you mean {close[0]}?" if close else "no such setting"
    if problem["loc"][:2] in (("transfer", "secret"), ("auth", "api_keys")):
        return str(problem["msg"])
    return f"{problem['msg']} (got {problem['input']!r})"


def _keys(model: type[BaseModel], path: Sequence[object]) -> list[str]:
    """Return the keys of the settings model at `path` below `model`; empty if there is none."""
    for step in path:
        if isinstance(step, int):
            continue  # an index of a list
        field = model.model_fields.get(str(step))
        if field is not None and field.annotation == list[ModelSettings]:
            model = ModelSettings
            continue
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        model = field.annotation
    return list(model.model_fields)
