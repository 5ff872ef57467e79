"""Messages between a router and an engine, and their encoding.

A router authenticates with the server's key, then sends one request at a time. The server answers
with items and an end. Each message is msgpack after a header with its kind and length.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from actors.request import Accepted, Call, Heartbeat, ResponseStart, StreamChunk

HEAD = struct.Struct(">BI")
"""Header: kind and length."""


@dataclass(frozen=True)
class RpcHello:
    """First message of a connection."""

    key: str


@dataclass(frozen=True)
class RpcRequest:
    """One call, and the state of the router that sends it."""

    call: Call
    router: str
    """Id of the router; a restarted router has a new one."""
    queued: int
    """Number of requests that wait in that router for a slot on an engine of this role."""
    transfer_id: str | None = None
    """Transfer of a prefill leg, which counts as ongoing until it is cancelled, at most `hold_s`
    after its end."""
    hold_s: float = 0.0
    maybe_full: bool = False
    """Whether the router expects that the engine may be full and waits for its reply."""


@dataclass(frozen=True)
class RpcCancel:
    """Cancels the router's `number`-th request; may cross the end of its answer."""

    number: int


@dataclass(frozen=True)
class RpcFailure:
    """Reason why the answer is missing or incomplete."""

    kind: Literal["full", "leaving", "engine_down", "cannot_resume", "stranger", "error"]
    message: str


@dataclass(frozen=True)
class RpcBody:
    """Piece of an answer's body without tokens or timings."""

    data: bytes


@dataclass(frozen=True)
class RpcEnd:
    """End of the answer; the next request may follow."""


KINDS: tuple[type, ...] = (
    Accepted,
    Heartbeat,
    ResponseStart,
    StreamChunk,
    RpcBody,
    RpcFailure,
    RpcEnd,
    RpcHello,
    RpcRequest,
    RpcCancel,
)
_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
_DECODERS: tuple[msgspec.msgpack.Decoder[Any], ...] = tuple(msgspec.msgpack.Decoder(kind) for kind in KINDS)
_ENCODER = msgspec.msgpack.Encoder()


class RpcProtocolError(ValueError):
    """Bytes that are no valid message at this point."""


def pack(item: Any) -> bytes:
    """Return a message of one of KINDS as bytes; plain bytes become an RpcBody."""
    item = RpcBody(item) if isinstance(item, bytes) else item
    payload = _ENCODER.encode(item)
    return HEAD.pack(_NUMBER[type(item)], len(payload)) + payload


class Unpacker:
    """Decodes messages from a stream of bytes; `most_bytes` limits the size of one message."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yield the messages that `data` completes. Raises RpcProtocolError."""
        self._rest += data
        at = 0
        while len(self._rest) - at >= HEAD.size:
            kind, length = HEAD.unpack_from(self._rest, at)
            end = at + HEAD.size + length
            if kind >= len(KINDS):
                raise RpcProtocolError(f"unknown message kind {kind}")
            if self.most_bytes is not None and length > self.most_bytes:
                raise RpcProtocolError(f"message of {length} bytes; the limit is {self.most_bytes}")
            if len(self._rest) < end:
                break
            try:
                item = _DECODERS[kind].decode(self._rest[at + HEAD.size : end])
            except msgspec.MsgspecError as error:
                raise RpcProtocolError(f"invalid {KINDS[kind].__name__}: {error}") from None
            yield item.data if isinstance(item, RpcBody) else item
            at = end
        del self._rest[:at]
