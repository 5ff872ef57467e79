"""What routers and engines hand to each other: a call, and the items of its answer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Endpoint = Literal["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"]

Body = Mapping[str, Any]

Headers = tuple[tuple[bytes, bytes], ...]

TokenGroup = tuple[int, ...]

ReplayLog = tuple[TokenGroup, ...]

TRANSFER_FIELD = "kv_transfer_params"
"""The field of a request body that the router alone may set."""


@dataclass(frozen=True)
class ProducerAddress:
    """Where a prefill engine's workers are reached, as its connector describes itself."""

    remote_engine_id: str
    remote_host: str
    remote_port: int
    tp_size: int

    @classmethod
    def from_params(cls, params: Mapping[str, Any]) -> "ProducerAddress":
        """From a connector's reply; KeyError, TypeError or ValueError if it is not a description."""
        return cls(
            remote_engine_id=str(params["remote_engine_id"]),
            remote_host=str(params["remote_host"]),
            remote_port=int(params["remote_port"]),
            tp_size=int(params["tp_size"]),
        )


@dataclass(frozen=True)
class Call:
    """An HTTP request on its way to an engine, and what of its answer another engine has already streamed."""

    method: str
    path: str
    headers: Headers = ()
    body: bytes = field(default=b"", repr=False)
    replay_log: ReplayLog = field(default=(), repr=False)


@dataclass(frozen=True)
class Accepted:
    """The first item of every call: `replica` has it, as one of so many."""

    replica: str
    ongoing: int = 1


@dataclass(frozen=True)
class Heartbeat:
    """The engine has answered a question since the item before: it lives, whatever keeps this call waiting."""


@dataclass(frozen=True)
class EngineTimings:
    """What an engine says of one call. Seconds since the call reached it, on its host's monotonic clock."""

    queued_s: float
    """It is on its way to the engine's scheduler."""
    scheduled_s: float
    """The first step that computes it begins."""
    first_token_s: float
    """That step, or the last of the prompt's steps, has ended."""
    answered_s: float
    """The first bytes of the answer leave; of an answer that is not streamed, the whole."""
    kv_asked_s: float | None = None
    """There were blocks for KV from elsewhere, and it was asked for; None where none was wanted."""
    kv_ended_s: float | None = None
    """All of it had arrived, or it was known that it will not."""
    kv_failed: bool = False


@dataclass(frozen=True)
class ResponseStart:
    """The first item of every response."""

    status: int
    headers: Headers
    timings: EngineTimings | None = None
    """Of an answer that is not a stream: it begins when all of it has been generated."""

    @property
    def streams(self) -> bool:
        """Whether the body is a stream of server-sent events."""
        return any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers
        )


@dataclass(frozen=True)
class StreamChunk:
    """Bytes of a response body, and the groups of tokens that were generated since the chunk before."""

    body: bytes
    groups: ReplayLog
    timings: EngineTimings | None = None
    """Of a stream's first token, with the chunk that has it."""
