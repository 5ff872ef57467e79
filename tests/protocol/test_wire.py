"""Messages on the wire: they survive a round trip, and all other input raises WireError."""

import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from connectors.errors import WireError
from connectors.planning.blocks import BlockSet, empty_blocks
from connectors.protocol.agent_metadata import PROTOCOL_VERSION
from connectors.protocol.wire import (
    MAX_FRAME_BYTES,
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
    decode,
    encode,
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


def frame(header: object, body: bytes = b"", magic: bytes = b"TDM", version: int = PROTOCOL_VERSION) -> bytes:
    head = header if isinstance(header, bytes) else json.dumps(header).encode()
    return tagged(struct.pack("<3sBI", magic, version, len(head)) + head + body)


def tagged(content: bytes, key: bytes = b"") -> bytes:
    return content + hashlib.blake2b(content, key=key, digest_size=32).digest()


def offer_header(**changes: object) -> dict[str, object]:
    return {
        "kind": "offer",
        "from": "a",
        "rank": 0,
        "to": "b",
        "to_rank": 0,
        "id": "t",
        "end": 9,
        "prompt": "",
        "blocks": [],
        "digest": False,
        "number": 4,
    } | changes


def fin_header(**changes: object) -> dict[str, object]:
    return {
        "kind": "fin",
        "from": "a",
        "rank": 0,
        "to": "b",
        "to_rank": 0,
        "id": "t",
        "bytes": 3,
        "digest": "",
    } | changes


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


@pytest.mark.parametrize("message", [m for m in MESSAGES if not isinstance(m, Hello)], ids=lambda message: message.kind)
def test_bytes_after_the_end_are_refused(message: Message) -> None:
    """A frame has exactly the content that its header announces."""
    with pytest.raises(WireError):
        decode(encode(Envelope(SENDER, RECEIVER, message)) + b"\0")


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"", "a frame has 0 bytes"),
        (frame({}, magic=b"XYZ"), "does not start with b'TDM'"),
        (frame({}, version=PROTOCOL_VERSION + 1), f"version {PROTOCOL_VERSION + 1}, this engine {PROTOCOL_VERSION}"),
        (frame({}, version=0), "version 0"),
        (tagged(struct.pack("<3sBI", b"TDM", PROTOCOL_VERSION, 2**32 - 1)), "truncated"),
        (frame(b"not json"), "malformed frame"),
        (frame(b"\xff\xfe"), "malformed frame"),
        (frame(b""), "malformed frame"),
        (frame(b"[" * 60_000), "malformed frame"),
        (frame(b"[" * 100_000), "a header has 100000 bytes; the limit is 65536"),
        (frame([1]), "not a JSON object"),
        (frame("text"), "not a JSON object"),
        (frame({}), "'from' must be a string"),
        (frame({"from": 3, "rank": 0}), "'from' must be a string, not 3"),
        (frame({"from": "a", "rank": -1}), "'rank' must be a whole number of at most 63 bits, not -1"),
        (frame({"from": "a", "rank": 1.0}), "'rank' must be a whole number"),
        (frame({"from": "a", "rank": True}), "'rank' must be a whole number"),
        (frame({"from": "a", "rank": 2**63}), "'rank' must be a whole number"),
        (frame(offer_header(number=-1)), "'number' must be a whole number"),
        (frame({"from": "a", "rank": 0}), "'to' must be a string"),
        (frame({"from": "a", "rank": 0, "to": "b"}), "'to_rank' must be a whole number of at most 63 bits, not None"),
        (frame(fin_header(id="t" * 257)), "'id' has 257 characters; the limit is 256"),
        (frame({"from": "a", "rank": 0, "to": "b", "to_rank": 0}), "unknown kind of message None"),
        (frame({"from": "a", "rank": 0, "to": "b", "to_rank": 0, "kind": "greet"}), "unknown kind of message 'greet'"),
        (frame({"from": "a", "rank": 0, "to": "b", "to_rank": 0, "kind": ["fin"]}), "unknown kind of message"),
        (
            frame({"from": "a", "rank": 0, "to": "b", "to_rank": 0, "kind": "fin", "id": "t"}),
            "'bytes' must be a whole number",
        ),
        (frame({"from": "a", "rank": 0, "to": "b", "to_rank": 0, "kind": "fin", "id": "t", "bytes": -5}), "not -5"),
        (frame({"from": "a", "rank": 0, "to": "b", "to_rank": 0, "kind": "alive"}), "'id' must be a string"),
        (
            frame({"from": "a", "rank": 0, "to": "b", "to_rank": 0, "kind": "alive", "id": "t"}, b"x"),
            "a body of 1 bytes, but must have none",
        ),
        (frame(fin_header(digest=None)), "'digest' must be a string, not None"),
        (frame({k: v for k, v in fin_header().items() if k != "digest"}), "'digest' must be a string, not None"),
        (frame(fin_header(digest="0" * 31)), "'digest' must be empty or 32 hexadecimal digits"),
        (frame(fin_header(digest="0" * 33)), "'digest' must be empty or 32 hexadecimal digits"),
        (frame(fin_header(digest="0" * 32 + "\n")), "'digest' must be empty or 32 hexadecimal digits"),
        (frame(fin_header(digest="A" * 32)), "'digest' must be empty or 32 hexadecimal digits"),
        (frame(offer_header(digest=None)), "'digest' must be true or false, not None"),
        (frame(offer_header(digest=1)), "'digest' must be true or false, not 1"),
        (frame(offer_header(digest="")), "'digest' must be true or false"),
        (frame(offer_header(end=-1)), "'end' must be a whole number"),
        (frame(offer_header(prompt=None)), "'prompt' must be a string"),
        (frame(offer_header(blocks=None)), "the number of blocks of each group"),
        (frame(offer_header(blocks=[-1])), "the number of blocks of each group"),
        (frame({"kind": "alive", "from": "a", "rank": 0, "to": "b", "to_rank": 0, "id": "t"}), "'left' must be lists"),
        (frame(offer_header(blocks=[True])), "the number of blocks of each group"),
        (frame(offer_header(blocks=[1.0]), vectors(0, 1)), "the number of blocks of each group"),
        (frame(offer_header(blocks=[1])), "an offer of 1 blocks has 0 bytes"),
        (frame(offer_header(blocks=[1]), vectors(0, 1, 2)), "not 16 per block"),
        (frame(offer_header(blocks=[2**62, 2**62])), "not 16 per block"),
        (frame(offer_header(blocks=[1]), vectors(-1, 5)), "positions must ascend and be at least 0"),
        (frame(offer_header(blocks=[1]), vectors(0, 0)), "block ids must be positive"),
        (frame(offer_header(blocks=[1]), vectors(0, -7)), "block ids must be positive"),
        (frame(offer_header(blocks=[2]), vectors(3, 3, 1, 2)), "positions must ascend"),
        (frame(offer_header(blocks=[2]), vectors(4, 3, 1, 2)), "positions must ascend"),
        (frame(offer_header(blocks=[2]), vectors(-(2**63), 2**63 - 1, 1, 2)), "positions must ascend"),
        (frame(offer_header(blocks=[3]), vectors(0, 2**63 - 1, -5, 1, 2, 3)), "positions must ascend and be at least"),
    ],
)
def test_malformed_frames_say_why(bad: bytes, says: str) -> None:
    """The message names the error, so that one log line explains it."""
    with pytest.raises(WireError, match=says):
        decode(bad)


def test_a_block_that_is_offered_twice_is_refused() -> None:
    """Two positions cannot be written into one block: one of them would be lost."""
    for counts, body in (([2], vectors(0, 1, 5, 5)), ([1, 1], vectors(0, 5, 0, 5))):
        with pytest.raises(WireError, match="twice"):
            decode(frame(offer_header(blocks=counts), body))


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
    for content in (b"[" * 10, b"{}", encode(Envelope(SENDER, RECEIVER, MESSAGES[0]))[8:-32]):
        bad = struct.pack("<3sBI", b"TDM", PROTOCOL_VERSION, len(content)) + content
        with pytest.raises(WireError, match="the sender has another secret"):
            decode(tagged(bad, theirs), KEY)


def test_a_peer_of_the_version_before() -> None:
    """Version 2 had no tag: its frames are refused by version, whatever their end."""
    header = json.dumps({"kind": "alive", "from": "a", "rank": 0, "to": "b", "id": "transfer " + "i" * 40}).encode()
    old = struct.pack("<3sBI", b"TDM", 2, len(header)) + header
    with pytest.raises(WireError, match=f"version 2, this engine {PROTOCOL_VERSION}"):
        decode(old, KEY)


def test_reasons_are_cut() -> None:
    """A peer's text is cut to the length of a log line."""
    message = decode(encode(Envelope(SENDER, RECEIVER, Refused("x" * 10**6)))).message
    assert message == Refused("x" * 1000)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
HEADER_KEYS = ("kind", "from", "rank", "to", "to_rank", "id", "end", "prompt", "blocks", "bytes", "reason", "digest")


@settings(max_examples=300)
@given(
    st.sampled_from([kind.kind for kind in Message.__args__]),
    st.dictionaries(st.sampled_from(HEADER_KEYS), JSON, max_size=2),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=6),
)
@example("offer", {"blocks": [10**4000, 9 * 10**4299, 9 * 10**4299]}, [])
def test_fuzz_headers(kind: str, changes: dict[str, object], numbers: list[int]) -> None:
    """Headers of well-formed JSON with fields of any type decode or raise WireError."""
    digest: object = kind == "offer" or "0" * 32
    header = offer_header(kind=kind, bytes=3, reason="r", blocks=[len(numbers) // 2], digest=digest) | changes
    raises_nothing_else(frame(header, vectors(*numbers) if kind == "offer" else b""))
