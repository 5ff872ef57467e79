"""Settings of transfers that a service's configuration and a connector's share. The service imports
this module, so it imports neither vLLM nor NIXL.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, model_validator

from connectors.errors import ConfigurationError
from connectors.protocol.limits import MIN_FORGET_S, TransferLimits
from connectors.settings import Seconds, Settings

MIN_SECRET_CHARACTERS = 16

_LIMITS = TransferLimits()


class TransferOptions(Settings):
    """Keys of `kv_connector_extra_config` that a service sets for both roles."""

    side_channel_host: str | None = Field(
        None, description="address on which an engine's side channel listens; unset: the address of the node"
    )
    side_channel_port: int = Field(
        0,
        ge=0,
        le=65535,
        description="port of the side channel; 0: any free port. Data-parallel rank r listens on `side_channel_port` "
        "+ r",
    )
    advertise_host: str = Field(
        "",
        description="address at which peers reach the side channel; required if side_channel_host is `0.0.0.0` or "
        "`::`; empty: side_channel_host",
    )
    backends: list[str] = Field(["UCX"], min_length=1, description="NIXL backends")
    devices: list[str] = Field(
        [],
        description="network devices that UCX may use, by UCX's names (`mlx5_0:1`, `eth0`); empty: "
        "`UCX_NET_DEVICES`. Without both: loopback if side_channel_host is loopback; else all if the node has RDMA "
        "devices; else the interface with the side channel's address",
    )
    integrity: Literal["auto", "full", "off"] = Field(
        "auto",
        description="full: decode compares digests of all moved bytes before it runs the request; off: no digests "
        "(refused on GPUs before Hopper); auto: same as full",
    )
    streaming: Literal["auto", "chunk", "layer"] = Field(
        "auto",
        description="chunk: prefill sends KV after each chunk of the prompt; layer: the last chunk also layer by "
        "layer; auto: layer, or chunk on an accelerator. Always chunk with ubatching or KV of drafts",
    )
    trace_path: str = Field("", description="file to which each transfer event is appended as a JSON line; empty: none")
    handshake_s: Seconds = Field(
        _LIMITS.handshake_s, description="timeout of a handshake, the first contact of two engines"
    )
    progress_s: Seconds = Field(
        _LIMITS.progress_s,
        description="time without a message about a transfer after which decode cancels it; also without progress of "
        "a write, after which prefill's heartbeat for it stops. After twice this time prefill aborts it",
    )
    cancel_s: Seconds = Field(
        _LIMITS.cancel_s,
        description="timeout for the answer to a cancellation; then decode quarantines the request's blocks and "
        "computes it in other blocks",
    )
    lease_s: Seconds = Field(
        _LIMITS.lease_s, description="time for which prefill holds finished blocks for an offer of decode"
    )
    alive_s: Seconds = Field(
        _LIMITS.alive_s,
        description="interval of prefill's heartbeats for a transfer; at most half of progress_s",
    )
    step_s: Seconds = Field(
        _LIMITS.step_s,
        description="time without a finished step after which a prefill engine with work stops its heartbeat; an "
        "engine whose core does not answer for 30 s more is replaced. No lower than "
        "`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS` (300)",
    )
    fence_s: Seconds = Field(
        _LIMITS.fence_s,
        description="longest time for which a prefill engine's step waits for a write that reads blocks of a "
        "preempted request; then the transfer fails. With vLLM's V2 model runner the step does not wait",
    )
    forget_s: Annotated[float, Field(ge=MIN_FORGET_S, allow_inf_nan=False)] = Field(
        _LIMITS.forget_s,
        description="silence after which prefill forgets a decode worker without an open transfer; decode forgets an "
        "unused prefill engine after half of it",
    )

    @property
    def limits(self) -> TransferLimits:
        return TransferLimits(**{each.name: getattr(self, each.name) for each in fields(TransferLimits)})

    @model_validator(mode="after")
    def _limits_fit(self) -> TransferOptions:
        try:
            self.limits  # noqa: B018 - the class checks them
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        return self
