"""Bytes that engines exchange: frames of messages, and agent metadata. Decoding checks everything.

    frame     b"TDM" | version, one byte | MessagePack of [sender, receiver, message] | tag
    tag       keyed BLAKE2b of everything before it, 32 bytes. The key derives from the peers'
              secret (``handshake/secret.py``); without a secret, the tag is a checksum
    metadata  JSON, which operators can read to debug a refusal; its size matters little

The schema of a message follows from its dataclass in ``protocol/wire.py`` and from ``_FIELDS``. The
vectors of an Offer are bytes: int64, little endian.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import fields
from typing import Annotated, Any, Union

import msgspec
import numpy as np
from msgspec import Meta

from connectors.errors import PlanError, WireError
from connectors.planning.blocks import BlockSet
from connectors.protocol.agent_metadata import PROTOCOL_VERSION, AgentMetadata
from connectors.protocol.wire import Envelope, Message, Offer, Peer

MAX_FRAME_BYTES = 64 * 2**20
MAX_METADATA_BYTES = 16 * 2**20
_MAX_REASON_CHARACTERS = 1000
_MAX_GROUPS = 1024
_MAX_INTEGER = 2**63 - 1

_HEAD = b"TDM" + bytes([PROTOCOL_VERSION])
_TAG_BYTES = 32

_Id = Annotated[str, Meta(max_length=256)]
_Number = Annotated[int, Meta(ge=0, le=_MAX_INTEGER)]
_FIELDS: dict[str, Any] = {
    "agent_metadata": bytes,
    "transfer_id": _Id,
    "reason": Annotated[str, Meta(max_length=_MAX_REASON_CHARACTERS)],
    "number": _Number,
    "end_token": _Number,
    "total_bytes": _Number,
    "prompt_digest": _Id,
    "left": Annotated[list[_Number], Meta(max_length=_MAX_GROUPS)],
    "groups": Annotated[list[tuple[bytes, bytes]], Meta(max_length=_MAX_GROUPS)],
    "Offer.digest": bool,
    "Fin.digest": Annotated[str, Meta(pattern=r"\A([0-9a-f]{32})?\Z")],
}


def _schema(kind: type[Any]) -> type[msgspec.Struct]:
    typed = [(f.name, _FIELDS.get(f"{kind.__name__}.{f.name}") or _FIELDS[f.name]) for f in fields(kind)]
    return msgspec.defstruct(kind.__name__, typed, tag=kind.kind, forbid_unknown_fields=True)


_KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in Message.__args__}
_SCHEMAS = {name: _schema(kind) for name, kind in _KINDS.items()}
_Peer = tuple[Annotated[str, Meta(max_length=1024)], _Number]
_FRAMES = msgspec.msgpack.Decoder(tuple[_Peer, _Peer, Union[tuple(_SCHEMAS.values())]])  # type: ignore[misc]  # noqa: UP007


def encode(envelope: Envelope, key: bytes = b"") -> bytes:
    """Cuts a long reason and escapes its lone surrogates; raises WireError for one in an id."""
    message = envelope.message
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    if "reason" in values:
        reason = values["reason"].encode(errors="backslashreplace").decode()
        values["reason"] = reason[:_MAX_REASON_CHARACTERS]
    if "groups" in values:
        values["groups"] = [(_vector(each.positions), _vector(each.ids)) for each in values["groups"]]
    peers = [(peer.incarnation, peer.rank) for peer in (envelope.sender, envelope.receiver)]
    try:
        content = _HEAD + msgspec.msgpack.encode([*peers, _SCHEMAS[type(message).__name__](**values)])
    except UnicodeEncodeError as error:
        raise WireError(f"cannot encode a {message.kind} message: {error}") from error
    return content + tag(content, key)


def tag(content: bytes | memoryview, key: bytes) -> bytes:
    return hashlib.blake2b(content, key=key, digest_size=_TAG_BYTES).digest()


def decode(frame: bytes, key: bytes = b"") -> Envelope:
    """Raises WireError for a malformed frame, another version, or a tag that does not match."""
    least = len(_HEAD) + _TAG_BYTES
    if not least <= len(frame) <= MAX_FRAME_BYTES:
        raise WireError(f"a frame has {len(frame)} bytes; allowed are {least} to {MAX_FRAME_BYTES}")
    if frame[:3] != _HEAD[:3]:
        raise WireError("the frame does not start with b'TDM'; another program sends to this port or agent")
    if frame[3] != PROTOCOL_VERSION:
        raise WireError(
            f"the peer has protocol version {frame[3]}, this engine {PROTOCOL_VERSION}; "
            "run the same Tandem release on both sides"
        )
    content = memoryview(frame)[:-_TAG_BYTES]
    if not hmac.compare_digest(tag(content, key), frame[-_TAG_BYTES:]):
        raise WireError(
            "the frame's tag is wrong: the frame is damaged, or the sender has another secret; set the same "
            "transfer.secret (kv_connector_extra_config: secret) on both engines"
        )
    try:
        sender, receiver, found = _FRAMES.decode(content[len(_HEAD) :])
        kind = _KINDS[type(found).__name__]
        values = {field.name: getattr(found, field.name) for field in fields(kind)}
        if kind is Offer:
            values["groups"] = _block_sets(found.groups)
        elif "left" in values:
            values["left"] = tuple(found.left)
        return Envelope(Peer(*sender), Peer(*receiver), kind(**values))
    except (msgspec.MsgspecError, ValueError, RecursionError, PlanError) as error:
        raise WireError(f"malformed frame: {str(error)[:300]}") from error


def _vector(numbers: np.ndarray) -> bytes:
    return numbers.astype("<i8").tobytes()


def _block_sets(groups: list[tuple[bytes, bytes]]) -> tuple[BlockSet, ...]:
    sets = []
    for vectors in groups:
        positions, ids = (np.frombuffer(each, "<i8").astype(np.int64) for each in vectors)
        sets.append(BlockSet(positions, ids))
        if len(ids) and (positions.min() < 0 or ids.min() <= 0 or (np.diff(positions) <= 0).any()):
            raise WireError("an offer's positions must ascend and be at least 0, and its block ids must be positive")
    ids = np.concatenate([np.empty(0, np.int64), *(each.ids for each in sets)])
    if len(np.unique(ids)) != len(ids):
        raise WireError("an offer has a block twice: block ids must be unique over all groups")
    return tuple(sets)


_MAX_ROWS = 2**20
_MOST = {
    "tp_size": 4096,
    "block_tokens": 2**24,
    "rows": _MAX_ROWS,
    "heads": _MAX_ROWS,
    "stripes": _MAX_ROWS,
    "kernel_blocks": _MAX_ROWS,
}
"""Limits of numbers in agent metadata that determine how much memory a plan takes."""


_METADATA = msgspec.json.Decoder(AgentMetadata)
"""Built at import: two threads that build it at once crash the process (msgspec 0.22)."""


def encode_agent_metadata(agent_metadata: AgentMetadata) -> bytes:
    return msgspec.json.encode({"version": PROTOCOL_VERSION, "worker": agent_metadata})


def decode_agent_metadata(payload: bytes) -> AgentMetadata:
    """Raises WireError if it is malformed or of another version."""
    if len(payload) > MAX_METADATA_BYTES:
        raise WireError(f"agent metadata has {len(payload)} bytes; the limit is {MAX_METADATA_BYTES}")
    try:
        document = msgspec.json.decode(payload)
        if document["version"] != PROTOCOL_VERSION:
            raise WireError(
                f"the peer's metadata has protocol version {document['version']!r}, this engine {PROTOCOL_VERSION}; "
                "run the same Tandem release on both sides"
            )
        _check_numbers(document["worker"], "")
        return msgspec.convert(document["worker"], AgentMetadata)
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, PlanError, RecursionError) as error:
        raise WireError(f"malformed agent metadata: {str(error)[:300]}") from error


def _check_numbers(value: object, name: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_numbers(inner, key)
    elif isinstance(value, list):
        for inner in value:
            _check_numbers(inner, name)
    elif isinstance(value, int) and not 0 <= value <= _MOST.get(name, _MAX_INTEGER):
        raise WireError(f"agent metadata: {name} is {value}, but must be 0 to {_MOST.get(name, _MAX_INTEGER)}")
