"""What a router and an engine's door say to each other, as bytes: an order, and the items of its answer.

Each is msgpack; an item has its kind and length before it, as several may come in one read, or a part of one.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from actors.asgi_call import Accepted, Alive, Call, ResponseStart
from actors.journal import Chunk

HEAD = struct.Struct(">BI")
"""Kind and length of an item."""


@dataclass(frozen=True)
class Order:
    """One call, and what the router says beside it."""

    call: Call
    router: str
    """Who asks; a router that is started again is another."""
    queued: int
    """Requests that wait in that router for a place with an engine of this role."""
    transfer_id: str | None = None
    """Of a prefill leg, which is to count as ongoing until its connection is closed, at most `hold_s` after its end."""
    hold_s: float = 0.0


@dataclass(frozen=True)
class Failure:
    """Why there is no answer, or no more of it."""

    kind: Literal["full", "leaving", "engine_down", "cannot_resume", "error"]
    message: str


@dataclass(frozen=True)
class Body:
    """A piece of an answer's body, of which nothing else is known."""

    data: bytes


KINDS: tuple[type, ...] = (Accepted, Alive, ResponseStart, Chunk, Body, Failure)
_DECODERS: list[msgspec.msgpack.Decoder[Any]] = [msgspec.msgpack.Decoder(kind) for kind in KINDS]
_ENCODER = msgspec.msgpack.Encoder()
_ORDER = msgspec.msgpack.Decoder(Order)


class WireError(ValueError):
    """Bytes that are no order or no item."""


def pack_order(order: Order) -> bytes:
    """The body of a request to a door."""
    return _ENCODER.encode(order)


def unpack_order(data: bytes) -> Order:
    """Raises WireError."""
    try:
        return _ORDER.decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"not an order: {error}") from None


def pack(item: Any) -> bytes:
    """One item of an answer; plain bytes are a piece of its body."""
    item = Body(item) if isinstance(item, bytes) else item
    payload = _ENCODER.encode(item)
    return HEAD.pack(KINDS.index(type(item)), len(payload)) + payload


class Unpacker:
    """Items out of bytes that come in any pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The items that `data` completes; raises WireError."""
        self._rest += data
        at = 0
        while len(self._rest) - at >= HEAD.size:
            kind, length = HEAD.unpack_from(self._rest, at)
            end = at + HEAD.size + length
            if kind >= len(KINDS):
                raise WireError(f"no item has the kind {kind}")
            if len(self._rest) < end:
                break
            try:
                item = _DECODERS[kind].decode(self._rest[at + HEAD.size : end])
            except msgspec.MsgspecError as error:
                raise WireError(f"not a {KINDS[kind].__name__}: {error}") from None
            yield item.data if isinstance(item, Body) else item
            at = end
        del self._rest[:at]

    @property
    def empty(self) -> bool:
        """Whether the last item was whole."""
        return not self._rest
