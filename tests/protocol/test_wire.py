"""Messages on the wire: every message survives a round trip, all other input raises WireError."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connectors.codec import MAX_FRAME_BYTES, decode, encode
from connectors.errors import WireError
from connectors.planning.blocks import BlockSet, empty_blocks
from connectors.protocol.agent_metadata import PROTOCOL_VERSION
from connectors.protocol.wire import (
    Aborted,
    Alive,
    AwaitStart,
    Cancel,
    Cancelled,
    Envelope,
    Failed,
    Fin,
    Hello,
    Message,
    Offer,
    Peer,
    Refused,
    Starting,
    Welcome,
)
from tests.protocol.scripts import blocks

SENDER, RECEIVER = Peer("engine-a", 3), Peer("engine-b", 1)
KEY = bytes(range(32))
DIGEST = "0123456789abcdef0123456789abcdef"
LARGE = 2**63 - 1

MESSAGES: list[Message] = [
    Hello(b'{"agent metadata": "\x00\xff"}'),
    Welcome(),
    Refused("dtype differs"),
    AwaitStart("t-1", LARGE),
    Starting("t-1"),
    Offer("t-1", 37, "d1ge57", (blocks([0, 1, 7], [9, 4, 2**40]), empty_blocks(), blocks([5], [1]))),
    Offer("t" * 256, 0, "", (), True, LARGE),
    Alive("t-1"),
    Alive("t-1", (3, 0, 2**40)),
    Fin("t-1", LARGE),
    Fin("t-1", 0, DIGEST),
    Aborted("t-1", "the lease has expired"),
    Failed("t-1", "a write failed"),
    Cancel("t-1", 7),
    Cancelled("ünïcode ✓"),
]
BY_KIND = {message.kind: message for message in MESSAGES}


def kind(value: Any) -> str:
    return value.kind if hasattr(value, "kind") else ""


def frame_of(message: Message, key: bytes = b"", sender: Peer = SENDER, receiver: Peer = RECEIVER) -> bytes:
    return encode(Envelope(sender, receiver, message), key)


def tagged(content: bytes, key: bytes = b"") -> bytes:
    return content + hashlib.blake2b(content, key=key, digest_size=32).digest()


def same(left: Message, right: Message) -> bool:
    """Compare two messages, block vectors included."""
    if not isinstance(left, Offer) or not isinstance(right, Offer):
        return left == right
    vectors = [[[*map(int, each)] for g in one.groups for each in (g.positions, g.ids)] for one in (left, right)]
    return replace(left, groups=()) == replace(right, groups=()) and vectors[0] == vectors[1]


def test_every_message_survives_a_round_trip() -> None:
    assert {message.kind for message in MESSAGES} == {each.kind for each in Message.__args__}
    for message in MESSAGES:
        envelope = decode(frame_of(message, KEY), KEY)
        assert (envelope.sender, envelope.receiver) == (SENDER, RECEIVER)
        assert same(envelope.message, message)


@given(st.lists(st.sets(st.integers(0, 2**62), max_size=20), max_size=4), st.integers(1, 2**62))
def test_any_offer_survives_a_round_trip(positions: list[set[int]], first: int) -> None:
    groups = tuple(
        BlockSet(np.array(sorted(each), np.int64), first + 100 * number + np.arange(len(each)))
        for number, each in enumerate(positions)
    )
    offer = Offer("t", first, "digest", groups, first % 2 == 0, first)
    assert same(decode(frame_of(offer)).message, offer)


WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "await_start": {"transfer_id": ("t" * 257, 3, None), "number": (-1, 2**63, 1.0, True, "1")},
    "offer": {"end_token": (-1, None), "prompt_digest": (None, 5), "digest": (None, 1, ""), "number": (-1,)},
    "alive": {"left": ((-1,), (True,), (1.0,), None, 3)},
    "fin": {"total_bytes": (-5, 2**63, "5"), "digest": ("0" * 31, "0" * 33, "0" * 31 + "\n", "A" * 32, None)},
    "cancelled": {"transfer_id": ("t" * 257, True)},
}
"""Values that a field of a message cannot have."""
BLOCKS: list[tuple[list[int], list[int]]] = [
    ([-1], [5]),
    ([0], [0]),
    ([0], [-7]),
    ([3, 3], [1, 2]),
    ([4, 3], [1, 2]),
    ([-(2**63), LARGE], [1, 2]),
    ([0, LARGE, -5], [1, 2, 3]),
    ([0, 1], [5, 5]),
]
"""Positions that do not ascend from 0, and ids that are not positive or not unique."""


def impossible() -> Iterator[Any]:
    for name, wrong in WRONG.items():
        message: Any = BY_KIND[name]
        yield from (replace(message, **{field: value}) for field, values in wrong.items() for value in values)
    for positions, ids in BLOCKS:
        yield Offer("t", 9, "", (BlockSet(np.array(positions), np.array(ids)),))
    yield Offer("t", 9, "", (blocks([0], [5]), blocks([0], [5])))


@pytest.mark.parametrize("bad", list(impossible()), ids=repr)
def test_impossible_values_are_refused(bad: Message) -> None:
    """A peer may send any value of any field: numbers, ids and digests have limits."""
    with pytest.raises(WireError):
        decode(frame_of(bad))


@pytest.mark.parametrize("peer", [Peer("a", -1), Peer("a", 2**63), Peer(3, 0), Peer("a", True)])  # type: ignore[arg-type]
def test_impossible_peers_are_refused(peer: Peer) -> None:
    for ends in ({"sender": peer}, {"receiver": peer}):
        with pytest.raises(WireError):
            decode(frame_of(Welcome(), **ends))  # type: ignore[arg-type]


@pytest.mark.parametrize("message", MESSAGES, ids=kind)
def test_a_changed_or_cut_frame_is_refused(message: Message) -> None:
    """With a key nothing can be changed; without one, a frame has exactly its content."""
    whole = frame_of(message, KEY)
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode(bytes(changed), KEY)
    plain = frame_of(message)
    for frame in (*(plain[:length] for length in range(len(plain))), plain + b"\0"):
        with pytest.raises(WireError):
            decode(frame)
    if not isinstance(message, Hello):
        for content in (plain[:-33], plain[:-32] + b"\0"):
            with pytest.raises(WireError):
                decode(tagged(content))


@pytest.mark.parametrize("theirs", [b"", bytes(32), KEY[:31], KEY + b"\0"], ids=["none", "zeros", "shorter", "longer"])
def test_another_key_is_refused_before_the_content_is_read(theirs: bytes) -> None:
    for content in (frame_of(Welcome())[:-32], frame_of(Welcome())[:8] + b"[" * 100):
        with pytest.raises(WireError, match="secret"):
            decode(tagged(content, theirs), KEY)


@pytest.mark.parametrize("version", [0, 2, PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_another_version_is_named(version: int) -> None:
    """Whatever follows: other versions have other frames."""
    with pytest.raises(WireError, match=rf"version {version}\b.*{PROTOCOL_VERSION}"):
        decode(b"TDM" + bytes([version]) + bytes(100))


def test_foreign_and_oversized_frames_are_refused() -> None:
    for frame, says in ((tagged(b"XYZ" + frame_of(Welcome())[3:-32]), "TDM"), (bytes(MAX_FRAME_BYTES + 1), "67108865")):
        with pytest.raises(WireError, match=says):
            decode(frame)


def test_reasons_are_cut() -> None:
    """A peer's text becomes a log line."""
    for message in (Refused("x" * 10**6), Aborted("t", "x" * 10**6), Failed("t", "x" * 10**6)):
        assert replace(message, reason="x" * 1000) == decode(frame_of(message)).message


def test_lone_surrogates() -> None:
    """UTF-8 has none. Python puts them into the names of files that are not UTF-8."""
    assert decode(frame_of(Failed("t", "a\udc80"))).message == Failed("t", "a\\udc80")
    with pytest.raises(WireError):
        frame_of(AwaitStart("\ud800", 1))


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5), st.lists, max_leaves=4
)


@settings(max_examples=300)
@given(
    st.sampled_from([each for each in MESSAGES if fields(each)]),
    st.data(),
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
)
def test_hostile_frames_decode_or_raise(message: Any, data: st.DataObject, flips: list[tuple[int, int]]) -> None:
    """Fields of any type, and any bytes with a right tag; what decodes can be encoded again."""
    name = data.draw(st.sampled_from([field.name for field in fields(message)]))
    try:
        payload = bytearray(frame_of(replace(message, **{name: data.draw(ANY)}))[:-32])
    except Exception:  # no peer can encode this value
        payload = bytearray(frame_of(message)[:-32])
    for at, value in flips:
        payload[at % len(payload)] = value
    try:
        envelope = decode(tagged(bytes(payload)))
    except WireError:
        return
    assert same(decode(encode(envelope)).message, envelope.message)


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_raise(payload: bytes) -> None:
    for frame in (payload, tagged(b"TDM" + bytes([PROTOCOL_VERSION]) + payload)):
        try:
            decode(frame)
        except WireError:
            continue
