"""Messages of a transfer and their versioned frames.

Frame: ``b"TDM"``, one version byte, header length (uint32, little endian), JSON header, body, and a
tag: the keyed BLAKE2b of everything before it, 32 bytes. A Hello's body is agent metadata. An
Offer's body has, for each group, a vector of positions and a vector of block ids (int64, little
endian); the header has their lengths. Other messages have no body. The key derives from the peers'
secret (``handshake/keys.py``). Without a secret the tag is a checksum. ``decode`` raises WireError
for any other input, and checks the tag before it parses the header.

    consumer -> producer   Hello, AwaitStart, Offer, Cancel
    producer -> consumer   Welcome, Refused, Starting, Alive, Fin, Aborted, Failed, Cancelled

Every message names its sender and its receiver, each by incarnation and rank. A worker drops
messages to another worker or incarnation.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from connectors.errors import PlanError, WireError
from connectors.planning.blocks import BlockSet
from connectors.protocol.agent_metadata import PROTOCOL_VERSION

_PREFIX = struct.Struct("<3sBI")
_MAGIC = b"TDM"
_DIGEST = re.compile("[0-9a-f]{32}")
_TAG_BYTES = 32
MAX_FRAME_BYTES = 64 * 2**20
_MAX_HEADER_BYTES = 64 * 2**10
_MAX_REASON_CHARACTERS = 1000
MAX_ID_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class Peer:
    """One worker of one incarnation."""

    incarnation: str
    rank: int


@dataclass(frozen=True, slots=True)
class Hello:
    """Agent metadata of the consumer worker. The producer uses it to connect and to plan."""

    agent_metadata: bytes
    kind: ClassVar[str] = "hello"


@dataclass(frozen=True, slots=True)
class Welcome:
    """The producer worker has a plan for this consumer worker and accepts its offers."""

    kind: ClassVar[str] = "welcome"


@dataclass(frozen=True, slots=True)
class Refused:
    """The producer worker refuses this consumer worker.

    ``reason``  why the two engines cannot exchange KV
    """

    reason: str
    kind: ClassVar[str] = "refused"


@dataclass(frozen=True, slots=True)
class AwaitStart:
    """The consumer has a request without blocks for this transfer.

    ``number``  message number (``Offer``)

    Once the prefill request has arrived, the producer sends Alive every alive_s. When it is about
    to compute the prompt, it sends Starting, and repeats it every alive_s until the Offer arrives.
    Aborted or Failed ends the wait.
    """

    transfer_id: str
    number: int = 0
    kind: ClassVar[str] = "await_start"


@dataclass(frozen=True, slots=True)
class Starting:
    """The producer is about to compute the prompt, or has computed it: the consumer can offer."""

    transfer_id: str
    kind: ClassVar[str] = "starting"


@dataclass(frozen=True, slots=True)
class Offer:
    """A consumer worker's blocks to fill. Valid once per transfer and consumer worker.

    ``end_token``      first token that the consumer computes itself: only earlier tokens need KV
    ``prompt_digest``  digest of the prompt (``params.prompt_digest``), compared by the producer
    ``groups``         blocks to fill, one set per group
    ``digest``         whether Fin must have a digest of the written bytes
    ``number``         message number, from one ascending counter of the consumer worker; with it
                       the producer detects late duplicates
    """

    transfer_id: str
    end_token: int
    prompt_digest: str
    groups: tuple[BlockSet, ...]
    digest: bool = False
    number: int = 0
    kind: ClassVar[str] = "offer"


@dataclass(frozen=True, slots=True)
class Alive:
    """The transfer is alive: the prefill request is queued, computing or held, or KV is written.

    ``left``  number of units of each group that have not arrived with all their layers; empty if
              none has arrived since the last Alive
    """

    transfer_id: str
    left: tuple[int, ...] = ()
    kind: ClassVar[str] = "alive"


@dataclass(frozen=True, slots=True)
class Fin:
    """This producer rank has written its part of the offered blocks and writes no more.

    ``total_bytes``  bytes written
    ``digest``       digest of the source bytes, 32 hexadecimal digits; empty if not requested
    """

    transfer_id: str
    total_bytes: int
    digest: str = ""
    kind: ClassVar[str] = "fin"


@dataclass(frozen=True, slots=True)
class Aborted:
    """This producer rank will not complete its part of the transfer, and writes no more."""

    transfer_id: str
    reason: str
    kind: ClassVar[str] = "aborted"


@dataclass(frozen=True, slots=True)
class Failed:
    """A write of this producer rank failed; this is no acknowledgement.

    Parts of the write may still arrive.
    """

    transfer_id: str
    reason: str
    kind: ClassVar[str] = "failed"


@dataclass(frozen=True, slots=True)
class Cancel:
    """The consumer needs no KV of the transfer, or no more of it.

    The consumer keeps its blocks until Fin, Aborted or Cancelled arrives, or the producer rank is
    dead.

    ``number``  number of the cancelled Offer or, without an Offer, a new number
    """

    transfer_id: str
    number: int = 0
    kind: ClassVar[str] = "cancel"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The producer rank's answer to Cancel: it writes no more of this transfer to that rank."""

    transfer_id: str
    kind: ClassVar[str] = "cancelled"


ToProducer = Hello | AwaitStart | Offer | Cancel
ToConsumer = Welcome | Refused | Starting | Alive | Fin | Aborted | Failed | Cancelled
Message = ToProducer | ToConsumer


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with its sender and its receiver."""

    sender: Peer
    receiver: Peer
    message: Message


def encode(envelope: Envelope, key: bytes = b"") -> bytes:
    """Return the frame of a message. Cuts a reason after _MAX_REASON_CHARACTERS.

    ``key``  key of the tag, at most 64 bytes; if empty, the tag is a checksum that anyone can
             compute
    """
    message = envelope.message
    header: dict[str, Any] = {
        "kind": message.kind,
        "from": envelope.sender.incarnation,
        "rank": envelope.sender.rank,
        "to": envelope.receiver.incarnation,
        "to_rank": envelope.receiver.rank,
    }
    body = b""
    match message:
        case Hello():
            body = message.agent_metadata
        case Offer():
            header |= {"id": message.transfer_id, "end": message.end_token, "prompt": message.prompt_digest}
            header |= {"blocks": [len(blocks) for blocks in message.groups], "digest": message.digest}
            header["number"] = message.number
            body = b"".join(v.astype("<i8").tobytes() for g in message.groups for v in (g.positions, g.ids))
        case Fin():
            header |= {"id": message.transfer_id, "bytes": message.total_bytes, "digest": message.digest}
        case Aborted() | Failed():
            header |= {"id": message.transfer_id, "reason": message.reason[:_MAX_REASON_CHARACTERS]}
        case Refused():
            header |= {"reason": message.reason[:_MAX_REASON_CHARACTERS]}
        case AwaitStart() | Cancel():
            header |= {"id": message.transfer_id, "number": message.number}
        case Alive():
            header |= {"id": message.transfer_id, "left": message.left}
        case Starting() | Cancelled():
            header |= {"id": message.transfer_id}
        case Welcome():
            pass
    head = json.dumps(header, separators=(",", ":")).encode()
    content = _PREFIX.pack(_MAGIC, PROTOCOL_VERSION, len(head)) + head + body
    return content + _tag(content, key)


def _tag(content: bytes | memoryview, key: bytes) -> bytes:
    return hashlib.blake2b(content, key=key, digest_size=_TAG_BYTES).digest()


def decode(frame: bytes, key: bytes = b"") -> Envelope:
    """Parse a frame. The caller must check sender and receiver.

    Raises WireError if the frame is malformed, truncated, too large, of another version, or if its
    tag does not match ``key``.
    """
    least = _PREFIX.size + _TAG_BYTES
    if not least <= len(frame) <= MAX_FRAME_BYTES:
        raise WireError(f"a frame has {len(frame)} bytes; allowed are {least} to {MAX_FRAME_BYTES}")
    magic, version, head_bytes = _PREFIX.unpack_from(frame)
    if magic != _MAGIC:
        raise WireError("the frame does not start with b'TDM'; another program sends to this port or agent")
    if version != PROTOCOL_VERSION:
        raise WireError(
            f"the peer has protocol version {version}, this engine {PROTOCOL_VERSION}; "
            "run the same Tandem release on both sides"
        )
    end = len(frame) - _TAG_BYTES
    if not hmac.compare_digest(_tag(memoryview(frame)[:end], key), frame[end:]):
        raise WireError(
            "the frame's tag is wrong: the frame is damaged, or the sender has another secret; set the same "
            "transfer.secret (kv_connector_extra_config: secret) on both engines"
        )
    body_at = _PREFIX.size + head_bytes
    if body_at > end:
        raise WireError(f"a frame of {len(frame)} bytes is truncated: its header has {head_bytes} bytes")
    if head_bytes > _MAX_HEADER_BYTES:
        raise WireError(f"a header has {head_bytes} bytes; the limit is {_MAX_HEADER_BYTES}")
    try:
        header = json.loads(frame[_PREFIX.size : body_at])
        if not isinstance(header, dict):
            raise WireError("the header is not a JSON object")
        sender = Peer(_text(header, "from"), _count(header, "rank"))
        receiver = Peer(_text(header, "to"), _count(header, "to_rank"))
        return Envelope(sender, receiver, _message(header, frame[body_at:end]))
    except (ValueError, RecursionError, PlanError) as error:
        raise WireError(f"malformed frame: {error}") from error


def _message(header: dict[str, Any], body: bytes) -> Message:
    kind = header.get("kind")
    if kind not in (Hello.kind, Offer.kind) and body:
        raise WireError(f"a message of kind {reprlib.repr(kind)} has a body of {len(body)} bytes, but must have none")
    match kind:
        case "hello":
            return Hello(body)
        case "welcome":
            return Welcome()
        case "refused":
            return Refused(_text(header, "reason"))
        case "offer":
            groups = _block_sets(header.get("blocks"), body)
            transfer_id, end_token = _id(header), _count(header, "end")
            digest, number = _flag(header, "digest"), _count(header, "number")
            return Offer(transfer_id, end_token, _text(header, "prompt"), groups, digest, number)
        case "await_start":
            return AwaitStart(_id(header), _count(header, "number"))
        case "starting":
            return Starting(_id(header))
        case "alive":
            return Alive(_id(header), _counts(header.get("left")))
        case "fin":
            return Fin(_id(header), _count(header, "bytes"), _digest(header, "digest"))
        case "aborted":
            return Aborted(_id(header), _text(header, "reason"))
        case "failed":
            return Failed(_id(header), _text(header, "reason"))
        case "cancel":
            return Cancel(_id(header), _count(header, "number"))
        case "cancelled":
            return Cancelled(_id(header))
    raise WireError(f"unknown kind of message {reprlib.repr(kind)}")


def _block_sets(counts: object, body: bytes) -> tuple[BlockSet, ...]:
    lengths = _counts(counts)
    if len(body) != 16 * sum(lengths):
        raise WireError(f"an offer of {sum(lengths)} blocks has {len(body)} bytes, not 16 per block")
    numbers = np.frombuffer(body, "<i8").astype(np.int64)
    sets: list[BlockSet] = []
    at = 0
    for count in lengths:
        positions, ids = numbers[at : at + count], numbers[at + count : at + 2 * count]
        if count and (positions.min() < 0 or ids.min() <= 0 or (np.diff(positions) <= 0).any()):
            raise WireError("an offer's positions must ascend and be at least 0, and its block ids must be positive")
        sets.append(BlockSet(positions, ids))
        at += 2 * count
    ids = np.concatenate([blocks.ids for blocks in sets]) if sets else np.empty(0, np.int64)
    if len(np.unique(ids)) != len(ids):
        raise WireError("an offer has a block twice: block ids must be unique over all groups")
    return tuple(sets)


def _counts(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(count) is int and 0 <= count < 2**63 for count in value):
        raise WireError("header fields 'blocks' and 'left' must be lists: the number of blocks of each group, or units")
    return tuple(value)


def _text(fields: Mapping[str, object], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str):
        raise WireError(f"header field {key!r} must be a string, not {reprlib.repr(value)}")
    return value


def _id(fields: Mapping[str, object]) -> str:
    """Return the transfer id.

    Raises WireError unless it is a string of at most MAX_ID_CHARACTERS: both ends store ids.
    """
    value = _text(fields, "id")
    if len(value) > MAX_ID_CHARACTERS:
        raise WireError(f"header field 'id' has {len(value)} characters; the limit is {MAX_ID_CHARACTERS}")
    return value


def _flag(fields: Mapping[str, object], key: str) -> bool:
    value = fields.get(key)
    if not isinstance(value, bool):
        raise WireError(f"header field {key!r} must be true or false, not {reprlib.repr(value)}")
    return value


def _digest(fields: Mapping[str, object], key: str) -> str:
    value = _text(fields, key)
    if value and not _DIGEST.fullmatch(value):
        raise WireError(f"header field {key!r} must be empty or 32 hexadecimal digits, not {reprlib.repr(value)}")
    return value


def _count(fields: Mapping[str, object], key: str) -> int:
    value = fields.get(key)
    if type(value) is not int or not 0 <= value < 2**63:
        raise WireError(f"header field {key!r} must be a whole number of at most 63 bits, not {reprlib.repr(value)}")
    return value
