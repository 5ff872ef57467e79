"""Messages on the wire: they survive a round trip, and all other input raises WireError."""

import hashlib

import msgspec
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

SENDER, RECEIVER = Peer("engine-a", 3), Peer("engine-b", 1)
KEY = bytes(range(32))


def blocks(*pairs: tuple[int, int]) -> BlockSet:
    return BlockSet(np.array([p for p, _ in pairs], np.int64), np.array([i for _, i in pairs], np.int64))


MESSAGES: list[Message] = [
    Hello(b'{"agent metadata": "\x00\xff"}'),
    Hello(b""),
    Welcome(),
    Refused("dtype differs"),
    AwaitStart("t-1"),
    AwaitStart("t-1", 2**40),
    Starting("t-1"),
    Offer("t-1", 37, "d1ge57", (blocks((0, 9), (1, 4), (7, 2**40)), empty_blocks(), blocks((5, 1)))),
    Offer("t-2", 0, "", (), True, 2**40),
    Alive("t-1"),
    Alive("t-1", (3, 0, 2**40)),
    Fin("t-1", 2**40),
    Fin("t-1", 0, "0123456789abcdef0123456789abcdef"),
    Aborted("t-1", "the lease has expired"),
    Failed("t-1", "a write failed: the connection was reset"),
    Cancel("t-1"),
    Cancel("t-1", 7),
    Cancelled("ünïcode ✓"),
]


def frame(content: object, magic: bytes = b"TDM", version: int = PROTOCOL_VERSION) -> bytes:
    encoded = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    return tagged(magic + bytes([version]) + encoded)


def tagged(content: bytes, key: bytes = b"") -> bytes:
    return content + hashlib.blake2b(content, key=key, digest_size=32).digest()


def offer(**changes: object) -> list[object]:
    """Return the content of an Offer's frame. A change to ``...`` removes a field."""
    fields = {"transfer_id": "t", "end_token": 9, "prompt_digest": "", "groups": [], "digest": False, "number": 4}
    return of_kind("offer", fields | changes)


def fin(**changes: object) -> list[object]:
    return of_kind("fin", {"transfer_id": "t", "total_bytes": 3, "digest": ""} | changes)


def of_kind(kind: object, fields: dict[str, object]) -> list[object]:
    return [("a", 0), ("b", 0), {"type": kind} | {name: each for name, each in fields.items() if each is not ...}]


def group(positions: list[int], ids: list[int]) -> tuple[bytes, bytes]:
    return vectors(*positions), vectors(*ids)


def vectors(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


def same(left: Message, right: Message) -> bool:
    """Compare two messages, block vectors included."""
    if not isinstance(left, Offer) or not isinstance(right, Offer):
        return left == right
    return (left.transfer_id, left.end_token, left.prompt_digest, left.digest, left.number, len(left.groups)) == (
        right.transfer_id,
        right.end_token,
        right.prompt_digest,
        right.digest,
        right.number,
        len(right.groups),
    ) and all(
        np.array_equal(a.positions, b.positions) and np.array_equal(a.ids, b.ids)
        for a, b in zip(left.groups, right.groups, strict=True)
    )


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_round_trip(message: Message) -> None:
    """Sender, receiver and every field survive a round trip."""
    envelope = decode(encode(Envelope(SENDER, RECEIVER, message)))
    assert (envelope.sender, envelope.receiver) == (SENDER, RECEIVER)
    assert same(envelope.message, message)


def test_every_message_is_covered() -> None:
    """Every message type has a round trip in this file."""
    assert {message.kind for message in MESSAGES} == {kind.kind for kind in Message.__args__}


@given(
    st.text(max_size=40),
    st.integers(0, 2**63 - 1),
    st.lists(st.sets(st.integers(0, 2**62), max_size=20), max_size=4),
    st.integers(1, 2**62),
)
def test_any_offer_round_trips(transfer_id: str, end: int, positions: list[set[int]], first: int) -> None:
    """Any ids, positions and numbers of groups survive a round trip."""
    groups = tuple(
        blocks(*((p, first + 100 * g + i) for i, p in enumerate(sorted(positions[g])))) for g in range(len(positions))
    )
    offer = Offer(transfer_id, end, "digest", groups, end % 2 == 0)
    assert same(decode(encode(Envelope(SENDER, RECEIVER, offer))).message, offer)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_truncated_at_every_length(message: Message) -> None:
    """A truncated frame is refused, wherever it ends."""
    whole = encode(Envelope(SENDER, RECEIVER, message))
    for length in range(len(whole)):
        with pytest.raises(WireError):
            decode(whole[:length])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_bytes_after_the_end_are_refused(message: Message) -> None:
    """A frame has exactly one message, signed or not."""
    whole = encode(Envelope(SENDER, RECEIVER, message))
    for longer in (whole + b"\0", tagged(whole[:-32] + b"\0")):
        with pytest.raises(WireError):
            decode(longer)


NUMBER, ID = "Expected `int`", "Expected `str` of length <= 256"


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"", "a frame has 0 bytes"),
        (frame([], magic=b"XYZ"), "does not start with b'TDM'"),
        (frame([], version=PROTOCOL_VERSION + 1), f"version {PROTOCOL_VERSION + 1}, this engine {PROTOCOL_VERSION}"),
        (frame([], version=0), "version 0"),
        (frame(b""), "truncated"),
        (frame(b"\xc1"), "malformed"),
        (frame(b"\xdd\xff\xff\xff\xff"), "of length 3, got 4294967295"),
        (frame(b"\x91" * 10**5), "of length 3"),
        (frame({}), "Expected `array`, got `object`"),
        (frame("text"), "Expected `array`, got `str`"),
        (frame([("a", 0), ("b", 0)]), "of length 3"),
        (frame([(3, 0), ("b", 0), {}]), r"Expected `str`, got `int` - at `\$\[0\]\[0\]`"),
        (frame([("a", -1), ("b", 0), {}]), NUMBER),
        (frame([("a", 1.0), ("b", 0), {}]), NUMBER),
        (frame([("a", True), ("b", 0), {}]), NUMBER),
        (frame([("a", 2**63), ("b", 0), {}]), NUMBER),
        (frame([("a" * 1025, 0), ("b", 0), {}]), "of length <= 1024"),
        (frame(of_kind(None, {})), "Expected `str`"),
        (frame(of_kind("greet", {})), "Invalid value 'greet'"),
        (frame(of_kind("x" * 10**6, {})), "Invalid value"),
        (frame(of_kind(["fin"], {})), "Expected `str`"),
        (frame(of_kind("fin", {"transfer_id": "t"})), "missing required field `total_bytes`"),
        (frame(of_kind("welcome", {"transfer_id": "t"})), "unknown field"),
        (frame(offer(number=-1)), NUMBER),
        (frame(offer(end_token=-1)), NUMBER),
        (frame(fin(total_bytes=-5)), NUMBER),
        (frame(fin(transfer_id="t" * 257)), ID),
        (frame(fin(transfer_id=...)), "missing required field `transfer_id`"),
        (frame(fin(digest=None)), "Expected `str`"),
        (frame(fin(digest=...)), "missing required field `digest`"),
        (frame(fin(digest="0" * 31)), "matching regex"),
        (frame(fin(digest="0" * 33)), "matching regex"),
        (frame(fin(digest="0" * 32 + "\n")), "matching regex"),
        (frame(fin(digest="A" * 32)), "matching regex"),
        (frame(of_kind("aborted", {"transfer_id": "t", "reason": "x" * 1001})), "of length <= 1000"),
        (frame(of_kind("alive", {"transfer_id": "t", "left": [0] * 1025})), "of length <= 1024"),
        (frame(of_kind("alive", {"transfer_id": "t", "left": [-1]})), NUMBER),
        (frame(offer(digest=None)), "Expected `bool`"),
        (frame(offer(digest=1)), "Expected `bool`"),
        (frame(offer(prompt_digest=None)), "Expected `str`"),
        (frame(offer(groups=None)), "Expected `array`"),
        (frame(offer(groups=[(b"", b"")] * 1025)), "of length <= 1024"),
        (frame(offer(groups=[(b"",)])), "of length 2"),
        (frame(offer(groups=[("", "")])), "Expected `bytes`"),
        (frame(offer(groups=[(b"1234567", b"")])), "multiple of element size"),
        (frame(offer(groups=[group([0], [])])), "vectors of equal length"),
        (frame(offer(groups=[group([-1], [5])])), "positions must ascend and be at least 0"),
        (frame(offer(groups=[group([0], [0])])), "block ids must be positive"),
        (frame(offer(groups=[group([0], [-7])])), "block ids must be positive"),
        (frame(offer(groups=[group([3, 3], [1, 2])])), "positions must ascend"),
        (frame(offer(groups=[group([4, 3], [1, 2])])), "positions must ascend"),
        (frame(offer(groups=[group([-(2**63), 2**63 - 1], [1, 2])])), "positions must ascend"),
        (frame(offer(groups=[group([0, 2**63 - 1, -5], [1, 2, 3])])), "positions must ascend and be at least"),
        (frame(offer(groups=[group([0, 1], [5, 5])])), "twice"),
        (frame(offer(groups=[group([0], [5]), group([0], [5])])), "twice"),
    ],
)
def test_malformed_frames_say_why(bad: bytes, says: str) -> None:
    """The message names the error, so that one short log line explains it."""
    with pytest.raises(WireError, match=says) as refusal:
        decode(bad)
    assert len(str(refusal.value)) < 400


def test_oversized_frames_are_refused() -> None:
    """A frame is at most 64 MiB, whatever its header says."""
    with pytest.raises(WireError, match=f"a frame has {MAX_FRAME_BYTES + 1} bytes"):
        decode(bytes(MAX_FRAME_BYTES + 1))


def raises_nothing_else(payload: bytes) -> None:
    """decode returns or raises WireError; its results can be encoded again."""
    try:
        envelope = decode(payload)
    except WireError:
        return
    assert same(decode(encode(envelope)).message, envelope.message)


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_fuzz_bytes(payload: bytes) -> None:
    """Any bytes, also behind a valid prefix, decode or raise WireError."""
    raises_nothing_else(payload)
    raises_nothing_else(frame(payload))


@settings(max_examples=300)
@given(st.integers(0, len(MESSAGES) - 1), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4))
def test_fuzz_flipped_bytes(which: int, flips: list[tuple[int, int]]) -> None:
    """Frames with a few changed bytes decode or raise WireError."""
    payload = bytearray(encode(Envelope(SENDER, RECEIVER, MESSAGES[which])))
    for at, value in flips:
        payload[at % len(payload)] = value
    raises_nothing_else(bytes(payload))
    raises_nothing_else(tagged(bytes(payload[:-32])))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind)
def test_every_bit_is_signed(message: Message) -> None:
    """Without the key, nothing can be changed: sender, receiver or content."""
    whole = encode(Envelope(SENDER, RECEIVER, message), KEY)
    assert same(decode(whole, KEY).message, message)
    for bit in range(8 * len(whole)):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(WireError):
            decode(bytes(changed), KEY)


@pytest.mark.parametrize("theirs", [b"", bytes(32), KEY[:31], KEY + b"\0"], ids=["none", "zeros", "shorter", "longer"])
def test_another_key_is_refused_before_anything_is_read(theirs: bytes) -> None:
    """A frame with another tag is refused before its header is parsed."""
    for content in (b"[" * 10, b"", encode(Envelope(SENDER, RECEIVER, MESSAGES[0]))[4:-32]):
        with pytest.raises(WireError, match="the sender has another secret"):
            decode(tagged(b"TDM" + bytes([PROTOCOL_VERSION]) + content, theirs), KEY)


def test_a_peer_of_an_earlier_version() -> None:
    """Frames of earlier versions, the first without a tag, are refused by version."""
    with pytest.raises(WireError, match=f"version 2, this engine {PROTOCOL_VERSION}"):
        decode(b"TDM\2" + bytes(100), KEY)


def test_reasons_are_cut() -> None:
    """A peer's text is cut to the length of a log line."""
    message = decode(encode(Envelope(SENDER, RECEIVER, Refused("x" * 10**6)))).message
    assert message == Refused("x" * 1000)


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ("type", "transfer_id", "end_token", "prompt_digest", "groups", "total_bytes", "reason", "digest", "left")


@settings(max_examples=300)
@given(
    st.sampled_from([kind.kind for kind in Message.__args__]),
    st.dictionaries(st.sampled_from(FIELDS), ANY, max_size=2),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6),
)
def test_fuzz_fields(kind: str, changes: dict[str, object], numbers: list[int]) -> None:
    """Well-formed content with fields of any type decodes or raises WireError."""
    half = len(numbers) // 2
    fields: dict[str, object] = {"transfer_id": "t", "reason": "r"}
    if kind == "offer":
        fields = {"transfer_id": "t", "end_token": 9, "prompt_digest": "", "digest": True, "number": 4}
        fields["groups"] = [group(numbers[:half], numbers[half:])]
    raises_nothing_else(frame(of_kind(kind, fields | changes)))
