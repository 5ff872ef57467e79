"""Calls from routers to engines, and the items of their answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Endpoint = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]

Body = Mapping[str, Any]

Headers = tuple[tuple[bytes, bytes], ...]

TokenGroup = tuple[int, ...]

ReplayLog = tuple[TokenGroup, ...]

TRANSFER_FIELD = "kv_transfer_params"
"""Field of a request body that only the router may set."""


@dataclass(frozen=True)
class ProducerAddress:
    """Network address of a prefill engine's workers, from its connector."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "ProducerAddress":
        """Return the address in a connector's reply. Raises KeyError, TypeError or ValueError if
        there is none."""
        return cls(
            remote_engine_id=str(params["remote_engine_id"]),
            remote_host=str(params["remote_host"]),
            remote_port=int(params["remote_port"]),
            tp_size=int(params["tp_size"]),
        )


@dataclass(frozen=True)
class Call:
    """An HTTP request to an engine, and the part of its answer that another engine has streamed."""

    method: str
    path: str
    """Escaped path, and after a question mark the query."""
    headers: Headers = ()
    body: bytes = field(default=b"", repr=False)
    replay_log: ReplayLog = field(default=(), repr=False)


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First item of each call: `replica` has accepted it, as one of `ongoing` calls."""

    replica: str
    ongoing: int = 1


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The engine core has answered since the previous item: the engine is alive, whatever delays
    this call."""


@dataclass(frozen=True)
class EngineTimings:
    """An engine's timings of one call: seconds since the call arrived, on its host's monotonic
    clock."""

    queued_s: float
    """The request is sent to the engine's scheduler."""
    scheduled_s: float
    """The first step that computes the request begins."""
    first_token_s: float
    """The prompt's last step has ended."""
    answered_s: float
    """The first bytes of the answer are sent; of an answer that is not streamed, all bytes."""
    kv_asked_s: float | None = None
    """Blocks are allocated and KV is requested from another engine; None if no KV was requested."""
    kv_ended_s: float | None = None
    """All KV has arrived, or the transfer has failed."""
    kv_failed: bool = False


class ResponseStart(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """First item of each response."""

    status: int
    headers: Headers
    timings: EngineTimings | None = None
    """Timings of an answer that is not streamed: it starts when all of it has been generated."""

    @property
    def streams(self) -> bool:
        """True if the body is a stream of server-sent events."""
        return any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers
        )


class StreamChunk(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Bytes of a response body, and the groups of tokens generated since the previous chunk."""

    body: bytes
    groups: ReplayLog
    timings: EngineTimings | None = None
    """Timings of a stream's first token, in the chunk that has it."""


Item = Accepted | Heartbeat | ResponseStart | StreamChunk | bytes
"""Item of an answer; plain bytes are a piece of the body without tokens or timings."""
