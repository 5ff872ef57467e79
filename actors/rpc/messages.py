"""Messages between a router and an engine, and their encoding.

A frame is a length and a msgpack array of messages; a message is an array that starts with its tag.
A later version may append fields with a default to a message: decoders ignore what they do not know.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from actors.request import Call, Item

LENGTH = struct.Struct(">I")
"""Header of a frame: number of bytes that follow."""


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


class RpcFailure(msgspec.Struct, frozen=True, array_like=True):
    """Reason why an answer is missing or incomplete."""

    kind: Literal["full", "leaving", "engine_down", "cannot_resume", "error"]
    message: str


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First message of a router: its newest protocol version, and the server's key. The encoding is
    the same in all versions."""

    version: int
    key: str


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First message of an engine: the version of all later messages on the connection."""

    version: int


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Last message of an engine that closes the connection."""

    reason: str


class Open(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Begins a stream: the engine answers with items and an End."""

    stream: int
    request: RpcRequest


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Begins a stream: the engine answers with the result of one of its methods, or an End."""

    stream: int
    method: str
    arguments: tuple[Any, ...]


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The router discards the rest of a stream; may cross its end."""

    stream: int


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The router has consumed this many bytes of a stream; may cross its end."""

    stream: int
    size: int


class StreamItem(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Next item of an answer."""

    stream: int
    item: Item


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Result of a method; ends the stream."""

    stream: int
    value: Any


class End(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Ends a stream, with the reason when its answer is missing or incomplete."""

    stream: int
    failure: RpcFailure | None = None


Message = Hello | Welcome | Refused | Open | Ask | Cancel | Credit | StreamItem | Reply | End

_DECODER = msgspec.msgpack.Decoder(list[Message])
_ENCODER = msgspec.msgpack.Encoder()


class RpcProtocolError(ValueError):
    """Bytes or messages that are not valid at this point."""


def encode(messages: Iterable[Message]) -> bytes:
    """Return one frame with these messages."""
    payload = _ENCODER.encode(list(messages))
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Decodes frames from a stream of bytes; `most_bytes` limits the size of one frame."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages of the frames that `data` completes. Raises RpcProtocolError."""
        self._rest += data
        at = 0
        while len(self._rest) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._rest, at)
            end = at + LENGTH.size + length
            if self.most_bytes is not None and length > self.most_bytes:
                raise RpcProtocolError(f"frame of {length} bytes; the limit is {self.most_bytes}")
            if len(self._rest) < end:
                break
            try:
                messages = _DECODER.decode(self._rest[at + LENGTH.size : end])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise RpcProtocolError(f"invalid frame: {error}") from None
            yield from messages
            at = end
        del self._rest[:at]
