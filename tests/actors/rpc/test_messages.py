"""Messages as bytes: recorded frames of each protocol version, partial frames, and invalid
frames.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from actors.request import (
    Accepted,
    Call,
    EngineTimings,
    Heartbeat,
    Moved,
    PrefillReport,
    ProducerAddress,
    ResponseStart,
    TokenChunk,
    TokenSource,
)
from actors.rpc.address import RpcAddress
from actors.rpc.messages import (
    LENGTH,
    Ask,
    CancelStream,
    Credit,
    EndStream,
    FrameReader,
    Open,
    PrefillCandidate,
    PrefillOrder,
    Reply,
    RpcFailure,
    RpcHello,
    RpcProtocolError,
    RpcRefused,
    RpcRequest,
    RpcWelcome,
    StreamItem,
    encode,
)
from actors.rpc.protocol import NEWEST_VERSION, OLDEST_VERSION

TIMINGS = EngineTimings(0.1, 0.2, 0.3, 0.4, kv_asked_s=0.15)
CALL = Call("POST", "/v1/completions", ((b"x-request-id", b"\xff"),), b"\x00{}", replay_log=((1,), (2, 3)))
ORDER = PrefillOrder(
    (PrefillCandidate("p", RpcAddress("10.0.0.1", 4711, "key"), ProducerAddress("e", "10.0.0.1", 4712, 2, 16)),),
    "router",
    3,
    True,
    7,
    3,
    120.0,
    30.0,
    5.0,
    60.0,
)
MESSAGES: dict[int, list[Any]] = {
    1: [
        RpcHello(1, "key"),
        RpcWelcome(1),
        RpcRefused("wrong key"),
        Open(1, RpcRequest(CALL, "router", 7)),
        Open(2, RpcRequest(Call("GET", "/version"), "r", 0, "transfer", 1.5, True)),
        Ask(3, "discard", ("transfer",)),
        CancelStream(1),
        Credit(1, 65_536),
        StreamItem(1, Accepted("replica", 3)),
        StreamItem(1, Heartbeat()),
        StreamItem(1, ResponseStart(200, ((b"content-type", b"text/event-stream"),))),
        StreamItem(1, ResponseStart(200, (), TIMINGS)),
        StreamItem(1, b"data: {}\n\n"),
        StreamItem(1, TokenChunk(b"data: \xff\n\n", ((1, 2), (3,)))),
        StreamItem(1, TokenChunk(b"", (), TIMINGS)),
        Reply(3, {"host": "a", "tokens": [1, 2.5, None]}),
        EndStream(1),
        EndStream(2, RpcFailure("engine_down", "killed")),
    ]
}
MESSAGES[2] = [
    *MESSAGES[1],
    RpcHello(2, "key"),
    Open(4, RpcRequest(CALL, "router", 7, prefill=ORDER)),
    CancelStream(4, done=True),
    StreamItem(4, PrefillReport("p", "accepted", 0.1, 0.2, 3)),
    StreamItem(4, PrefillReport("p", "computed", 0.1, 0.3, 0, 17, TIMINGS)),
    StreamItem(4, PrefillReport("", "alone", 0.5, 0.0, message="prefill_failed")),
]
"""Every message of each version, as an engine or a router of this release encodes it."""

RECORDED = Path(__file__).parent / "frames"
FILES = {
    1: ["version-1.hex", "version-1-movable.hex"],
    2: ["version-2.hex", "version-2-movable.hex"],
}
"""Recorded frames of each version: its first, and with all fields that were appended since."""


def test_the_origin_of_tokens() -> None:
    item = StreamItem(1, TokenChunk(b"", ((1,),), None, b"prompt", TokenSource("model", "adapter")))
    assert list(FrameReader().feed(encode([item]))) == [item]


def test_a_stream_that_moves() -> None:
    """An engine sends this item only to a router that has asked for it (`Call.movable`)."""
    call = Call("POST", "/v1/completions", movable=True, transfer={"transfer_id": "t", "remote_num_tokens": 7})
    messages: list[Any] = [StreamItem(1, Moved({"transfer_id": "t"})), Open(2, RpcRequest(call, "router", 0))]
    assert list(FrameReader().feed(encode(messages))) == messages


def test_every_supported_version_is_recorded() -> None:
    assert set(MESSAGES) == set(FILES) == set(range(OLDEST_VERSION, NEWEST_VERSION + 1))


@pytest.mark.parametrize("version", MESSAGES)
def test_recorded_frames(version: int) -> None:
    """This release reads the frames of that version's releases, and writes those of the last."""
    for name in FILES[version]:
        recorded = bytes.fromhex((RECORDED / name).read_text())
        assert list(FrameReader().feed(recorded)) == MESSAGES[version]
    assert b"".join(encode([message]) for message in MESSAGES[version]) == recorded


@pytest.mark.parametrize("most", [1, 2, 7, 4096, 10**9])
def test_frames_in_parts(most: int) -> None:
    """Frames of one or of all messages arrive byte by byte, in random parts, and whole."""
    messages = MESSAGES[NEWEST_VERSION]
    data = encode(messages) + b"".join(encode([one]) for one in messages)
    frames, parts = FrameReader(), random.Random(most)
    found: list[Any] = []
    while data:
        size = parts.randint(1, most)
        found += frames.feed(data[:size])
        data = data[size:]
    assert found == 2 * messages


def test_a_large_frame_is_refused_before_it_arrives() -> None:
    """At most the limit is buffered for an unknown peer."""
    frame = encode([CancelStream(1)])
    assert list(FrameReader(len(frame) - LENGTH.size).feed(frame)) == [CancelStream(1)]
    with pytest.raises(RpcProtocolError, match="the limit is 9"):
        list(FrameReader(9).feed(LENGTH.pack(10)))


def test_fields_of_a_later_version_are_ignored() -> None:
    """A message may have more fields at its end."""
    assert list(FrameReader().feed(LENGTH.pack(6) + b"\x91\x94\x05\x09\xc2\x2a")) == [CancelStream(9)]


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1\xc1\xc1",
        b"\x91\x92\x63\x01",  # tag 99
        b"\x91\x91\x05",  # a CancelStream of nothing
        b"\x91\x92\x05\xa1a",  # a CancelStream of a text
        b"\x93",  # an array that ends early
        b"",
    ],
)
def test_invalid_frames(payload: bytes) -> None:
    """Frames that neither an engine nor a router sends are refused."""
    with pytest.raises(RpcProtocolError, match="invalid frame"):
        list(FrameReader().feed(LENGTH.pack(len(payload)) + payload))
