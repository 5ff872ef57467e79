"""Settings of the Router deployment: limits, HTTP server and routing policy."""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from configs.settings.base import Frozen, Positive, Seconds
from configs.settings.deployment import PlacementSettings

BEAT_S = 5.0
"""Seconds from an engine core's answer to a liveness check until the next check.

After each answer the engine sends a heartbeat to routers with open calls.
"""

MIN_ONGOING_SEQUENCES = 4096
"""Minimum of a router's default `max_ongoing_sequences`."""


class RoutingSettings(Frozen):
    """Settings of the routing policy, which `user_config` can change while engines run.

    The router keeps its measurements unless an assumption (`assumed_*`) or `fades_s` changes.
    """

    policy: Literal["cost", "least_load", "round_robin", "always_remote", "never_remote"] = Field(
        "cost",
        description="cost: the cheapest of decode alone and all pairs; never_remote: the cheapest decode replica; "
        "always_remote: the cheapest pair; least_load, round_robin: a pair, its replicas chosen separately "
        "([policies](routing.md#policies))",
    )
    local_below_tokens: int = Field(
        32, ge=0, description="policy cost: decode serves prompts alone if it computes and loads fewer tokens than this"
    )
    decode_weight: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of a second after the first token, relative to a second before it",
    )
    interference_weight: float = Field(
        1.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of a second by which this request delays another stream, relative to a second before its "
        "own first token",
    )
    session_header: str = Field(
        "x-session-id",
        pattern="^[a-z0-9-]+$",
        description="requests with the same value of this header go to the same decode replica while it has a slot "
        "and has not just failed",
    )
    prefix_tokens_per_engine: int = Field(
        1_000_000,
        ge=0,
        description="maximum number of prompt tokens that the router assumes to be in the prefix cache of one "
        "engine; 0: none",
    )
    prefix_tokens_per_store: int = Field(
        4_000_000,
        ge=0,
        description="maximum number of prompt tokens that the router assumes to be in one KV store, also after a "
        "restart of its engines; 0: none",
    )
    fades_s: Seconds = Field(
        600.0,
        description="time constant of the exponential decay of a role's measurements. The cost factor of one engine or "
        "pair decays ten times as fast",
    )
    assumed_prefill_overhead_s: Seconds = Field(
        0.02, description="assumed at first: duration of a prefill without uncached tokens"
    )
    assumed_prefill_tokens_per_s: Positive = Field(
        10_000.0, description="assumed at first: rate at which an engine computes uncached prompt tokens"
    )
    assumed_load_tokens_per_s: Positive = Field(
        100_000.0, description="assumed at first: rate at which an engine loads prompt tokens from its KV store"
    )
    assumed_handover_s: Seconds = Field(
        0.02,
        description="assumed at first: duration of a handover without tokens to move, to a decode engine "
        "without running streams",
    )
    assumed_transfer_tokens_per_s: Positive = Field(
        200_000.0, description="assumed at first: rate at which tokens' KV moves after the prompt was computed"
    )
    assumed_step_s: Seconds = Field(0.02, description="assumed at first: duration of a decode step")
    assumed_bytes_per_token: Positive = Field(4.0, description="assumed at first: bytes of text per token")
    assumed_answer_tokens: int = Field(128, ge=1, description="assumed at first: tokens of an answer")


class RouterLimits(Frozen):
    """The router's deadlines, limits and routing; `user_config` changes them at run time."""

    request_timeout_s: Seconds = Field(
        3600.0,
        description="deadline from a request's arrival to its whole answer, if not streamed; 429 if the estimate, with "
        "three times the expected decoding, exceeds half of it. Requests without a body: limit of the answer's body",
    )
    first_token_timeout_s: Seconds = Field(
        600.0,
        description="deadline from the arrival of a streaming request to its first token, slot wait included. All "
        "requests whose estimate exceeds half of it get 429 ([overload](scaling.md#overload))",
    )
    idle_timeout_s: Seconds = Field(
        300.0,
        description="longest time between two tokens of a stream, and in which its client reads nothing (on "
        "`http_port` at most 10 s above the value in `args`); a stream with tokens has no other deadline",
    )
    keep_alive_s: Seconds | None = Field(
        10.0,
        description="a stream without a token after this time gets status 200 and SSE comments at this interval "
        "until its first token ([errors](http-api.md#errors)); set it below a load balancer's idle timeout. `null`: "
        "nothing is sent before",
    )
    body_timeout_s: Seconds = Field(30.0, description="deadline from a request's arrival to the end of its body")
    prefill_timeout_s: Seconds = Field(120.0, description="deadline from a prefill leg's start to its answer")
    replica_timeout_s: Seconds = Field(
        10.0,
        description="longest wait for a decode replica while none runs, or all have failed the request. Requests "
        "without a body: longest wait for a slot, and then for the start of the answer",
    )
    prefill_wait_s: Seconds = Field(
        1.0, description="longest wait for a slot on a prefill replica; then decode serves the request alone"
    )
    attempts: int = Field(
        3,
        ge=1,
        description="maximum number of attempts of each leg of a request, each on another replica. New tokens of a "
        "stream reset the number of decode attempts; a failed decode leg resets that of prefill",
    )
    silence_timeout_s: Seconds = Field(
        60.0,
        ge=3 * BEAT_S,
        description="longest silence of an engine with an open request; then the router tries another one. Engines "
        f"send a heartbeat every {BEAT_S:g} s, or after a longer step, also for queued requests",
    )
    metrics_timeout_s: Seconds = Field(
        5.0,
        description="longest wait for the parts of `/metrics` and `/tandem/status` from engines and other routers; "
        "late ones are omitted",
    )
    retry_after_s: int = Field(1, ge=1, description="smallest `Retry-After` of 429 and 503 responses, in seconds")
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
        description="requests of one API key in one router replica; further ones get 429. Unset: half of "
        "`max_ongoing_sequences`, or no limit if there is only one key",
    )
    client_priority: bool = Field(
        False,
        description="pass `X-Vllm-Priority` of clients to the engines, which use it with the engine argument "
        "`scheduling_policy: priority`, and order the router's queue by it or by a body's `priority`; "
        "false: drop it",
    )
    first_token: Literal["prefill", "decode"] = Field(
        "decode",
        description="role that samples the first token of a split request that streams or asks for one token. "
        "prefill: before the KV has moved, where [possible](http-api.md#first-token); decode: always decode",
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
        "Serve's proxy answers (`http_options`), which is slower (docs/benchmarks.md)",
    )
    keep_alive_timeout_s: Seconds = Field(
        90.0,
        description="time for which a connection to `http_port` may stay open without a request. Set it longer than "
        "your load balancer's idle timeout (nginx and AWS ALB 60 s, Google Cloud 600 s, Envoy 3600 s)",
    )
    leave_s: Seconds = Field(
        1.0,
        description="time for which a stopping router still accepts connections and returns 503 on "
        "`/tandem/service`; set it longer than a load balancer's check interval",
    )
    http_host: str = Field(
        "127.0.0.1", description="address on which routers listen for clients; `0.0.0.0`: all interfaces of the node"
    )
    ssl_certfile: str | None = Field(
        None,
        description="PEM file with the certificate chain of `http_port`, on each router's node; unset: no TLS. Changed "
        "files are used from the next connection on ([TLS](network.md#tls))",
    )
    ssl_keyfile: str | None = Field(None, description="PEM file with the unencrypted key of `ssl_certfile`")
    ssl_ca_certs: str | None = Field(
        None,
        description="PEM file with the authorities of client certificates. Set: clients need a certificate, except "
        "for /, /health, /ping, /load, /metrics and /tandem/service",
    )
    num_cpus: float = Field(0.1, ge=0, description="CPUs that the actor requests from Ray")
    resources: dict[str, float] = Field(
        default_factory=dict, description="custom Ray resources that the actor requests"
    )
    drain_s: Seconds = Field(
        30.0, description="time for which a stopping router may finish its requests, `leave_s` included"
    )
    access_log: bool = Field(
        True,
        description="write a JSON line per request to `access-<replica>.log` in the Ray session's log directory "
        "([fields](observing.md#access-log))",
    )
    request_log: Literal["off", "parameters", "text"] = Field(
        "off",
        description="add the body of each request to its line of the access log: `parameters` with lengths instead "
        "of lists and most texts, `text` with prompts",
    )
    allowed_origins: list[str] = Field(
        default_factory=list,
        description='origins of web pages that may call the router (CORS), for example `["https://chat.example"]`; '
        '`["*"]`: all; empty: none, as with `vllm serve`',
    )
    allowed_methods: list[str] = Field(default_factory=lambda: ["*"], description="HTTP methods for these origins")
    allowed_headers: list[str] = Field(default_factory=lambda: ["*"], description="request headers for these origins")
    allow_credentials: bool = Field(False, description="whether these origins may send cookies")
    otlp_traces_endpoint: str | None = Field(
        None,
        description="OTLP/HTTP endpoint of the router's spans, for example `http://collector:4318/v1/traces`; unset: "
        "no spans. The engine argument is vLLM's",
    )

    @field_validator("request_log", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        """Accept `off` without quotes, which YAML reads as false."""
        return "off" if value is False else value

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
