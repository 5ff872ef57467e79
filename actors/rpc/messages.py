"""What a router and an engine's server say to each other, as bytes.

A router says hello with the server's key, then sends one request at a time; the server answers with items and an end.
Each of these is msgpack with its kind and length before it, as several may come in one read, or a part of one.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from actors.request import Accepted, Call, Heartbeat, ResponseStart, StreamChunk

HEAD = struct.Struct(">BI")
"""Kind and length."""


@dataclass(frozen=True)
class RpcHello:
    """The first of all, from who calls."""

    key: str


@dataclass(frozen=True)
class RpcRequest:
    """One call, and what the router says beside it."""

    call: Call
    router: str
    """Who asks; a router that is started again is another."""
    queued: int
    """Requests that wait in that router for a place with an engine of this role."""
    transfer_id: str | None = None
    """Of a prefill leg, which is to count as ongoing until it is cancelled, at most `hold_s` after its end."""
    hold_s: float = 0.0
    maybe_full: bool = False
    """The engine may well have no place for it, and the router waits to hear of that."""


@dataclass(frozen=True)
class RpcCancel:
    """The router wants no more of its `number`-th request. It may cross the answer's end."""

    number: int


@dataclass(frozen=True)
class RpcFailure:
    """Why there is no answer, or no more of it."""

    kind: Literal["full", "leaving", "engine_down", "cannot_resume", "stranger", "error"]
    message: str


@dataclass(frozen=True)
class RpcBody:
    """A piece of an answer's body, of which nothing else is known."""

    data: bytes


@dataclass(frozen=True)
class RpcEnd:
    """There is no more of this answer; the next request may come."""


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
    """Bytes that say nothing that a router or a server would."""


def pack(item: Any) -> bytes:
    """One of KINDS; plain bytes are a piece of an answer's body."""
    item = RpcBody(item) if isinstance(item, bytes) else item
    payload = _ENCODER.encode(item)
    return HEAD.pack(_NUMBER[type(item)], len(payload)) + payload


class Unpacker:
    """What was packed, out of bytes that come in any pieces. `most_bytes`: what one of them may have."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """What `data` completes; raises RpcProtocolError."""
        self._rest += data
        at = 0
        while len(self._rest) - at >= HEAD.size:
            kind, length = HEAD.unpack_from(self._rest, at)
            end = at + HEAD.size + length
            if kind >= len(KINDS):
                raise RpcProtocolError(f"nothing has the kind {kind}")
            if self.most_bytes is not None and length > self.most_bytes:
                raise RpcProtocolError(f"{length} bytes, where {self.most_bytes} are the most")
            if len(self._rest) < end:
                break
            try:
                item = _DECODERS[kind].decode(self._rest[at + HEAD.size : end])
            except msgspec.MsgspecError as error:
                raise RpcProtocolError(f"not a {KINDS[kind].__name__}: {error}") from None
            yield item.data if isinstance(item, RpcBody) else item
            at = end
        del self._rest[:at]
