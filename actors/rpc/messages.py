"""Messages between a router and an engine, and their encoding.

A frame is a length and a msgpack array of messages; a message is an array that starts with its tag.
A later version may append fields with a default to a message: decoders ignore unknown fields.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from actors.request import Call, Item, ProducerAddress
from actors.rpc.address import RpcAddress

LENGTH = struct.Struct(">I")
"""Header of a frame: number of bytes that follow."""

KEEP = "keep"
"""Method of an engine with which a stopping router keeps it until the connection closes."""


class PrefillCandidate(msgspec.Struct, frozen=True, array_like=True):
    """A prefill engine that may compute a prompt: its id, and the addresses of its RPC server and
    of its KV.
    """

    replica: str
    address: RpcAddress
    producer: ProducerAddress


class PrefillOrder(msgspec.Struct, frozen=True, array_like=True):
    """Order to a decode engine to have a prefill engine compute the prompt of a call.

    ``candidates``         prefill engines of decode's identity, best first; the router holds a slot
                           on the first one
    ``router``, ``queued`` as in `RpcRequest`, for the calls to prefill engines
    ``samples``            whether prefill samples the first token of the answer
    ``seed``               seed to add to the request; None: as the client wrote it
    ``attempts``           number of failed prefill calls after which decode computes the prompt
    ``timeout_s``          longest time from a prefill call to its answer
    ``silence_s``          longest time without an item of a prefill call before its answer
    ``refused_s``          longest time from the first refusal to the last
    ``hold_s``             longest time for which a prefill engine holds computed KV
    """

    candidates: tuple[PrefillCandidate, ...]
    router: str
    queued: int
    samples: bool
    seed: int | None
    attempts: int
    timeout_s: float
    silence_s: float
    refused_s: float
    hold_s: float


@dataclass(frozen=True)
class RpcRequest:
    """One call, and the state of the router that sends it.

    ``router``       id of the router's engine pool, new at each start of the router
    ``queued``       number of the router's requests that wait for a slot of this role; of a list
                     of prompts, each waiting prompt counts
    ``transfer_id``  transfer of a call that computes a prompt for decode; None for other calls
    ``hold_s``       longest time in seconds for which such a call stays ongoing after its answer
    ``maybe_full``   whether the router believes the engine full, so that `Accepted` must not be
                     delayed
    ``prefill``      order to have the prompt computed elsewhere; only for decode engines whose
                     metadata has version 2 or later
    """

    call: Call
    router: str
    queued: int
    transfer_id: str | None = None
    hold_s: float = 0.0
    maybe_full: bool = False
    prefill: PrefillOrder | None = None


class RpcFailure(msgspec.Struct, frozen=True, array_like=True):
    """Reason why an answer is missing or incomplete.

    ``kind``  full: all slots are taken; leaving: the server accepts no more calls; engine_down: the
              engine has died or is stopping; cannot_resume: the engine cannot continue the replay
              log; error: an exception in the engine's actor
    """

    kind: Literal["full", "leaving", "engine_down", "cannot_resume", "error"]
    message: str


class RpcHello(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """First message of a router: its newest protocol version and the server's key.

    All protocol versions encode RpcHello in the same way.
    """

    version: int
    key: str


class RpcWelcome(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Answer of an engine that accepts an RpcHello: the protocol version of the connection."""

    version: int


class RpcRefused(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Last message of an engine that closes a connection because of an error, with the reason."""

    reason: str


class Open(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Request to open a stream for a call: the engine answers with items and an EndStream."""

    stream: int
    request: RpcRequest


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Request to open a stream for a method of the engine, which answers with a Reply or an
    EndStream.
    """

    stream: int
    method: str
    arguments: tuple[Any, ...]


class CancelStream(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Request to cancel a stream: the engine aborts its call or method, and the router discards the
    rest.

    May arrive after the stream has ended.

    ``done``  whether the KV that the call computed has arrived at decode. Otherwise a prefill
              engine discards it
    """

    stream: int
    done: bool = False


class Credit(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Credit for consumed items of `size` bytes (`item_bytes`).

    May arrive after the stream has ended.
    """

    stream: int
    size: int


class StreamItem(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """Next item of the answer to a call."""

    stream: int
    item: Item


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Result of a method; ends the stream."""

    stream: int
    value: Any


class EndStream(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """End of a stream; `failure` is set if the answer is missing or incomplete."""

    stream: int
    failure: RpcFailure | None = None


Message = RpcHello | RpcWelcome | RpcRefused | Open | Ask | CancelStream | Credit | StreamItem | Reply | EndStream

_DECODER = msgspec.msgpack.Decoder(list[Message])
_ENCODER = msgspec.msgpack.Encoder()


class RpcProtocolError(ValueError):
    """An invalid frame or message, a wrong key, an unsupported version, or an RpcRefused."""


def encode(messages: Iterable[Message]) -> bytes:
    """Return one frame with these messages."""
    payload = _ENCODER.encode(list(messages))
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Decoder of frames from a stream of bytes.

    ``most_bytes``  maximum size of one frame in bytes, without its header; None: no limit
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self.most_bytes = most_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages of the frames that `data` completes.

        Raises RpcProtocolError for a frame that is too large or cannot be decoded.
        """
        self._rest += data
        at = 0
        while len(self._rest) - at >= LENGTH.size:
            (length,) = LENGTH.unpack_from(self._rest, at)
            end = at + LENGTH.size + length
            if self.most_bytes is not None and length > self.most_bytes:
                raise RpcProtocolError(f"a frame has {length} bytes; the limit is {self.most_bytes}")
            if len(self._rest) < end:
                break
            try:
                messages = _DECODER.decode(self._rest[at + LENGTH.size : end])
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise RpcProtocolError(f"invalid frame: {error}") from None
            yield from messages
            at = end
        del self._rest[:at]
