"""Messages as bytes: what comes out is what went in, in whatever pieces it comes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actors.request import Accepted, Call, EngineTimings, Heartbeat, ResponseStart, StreamChunk
from actors.rpc.messages import (
    HEAD,
    RpcCancel,
    RpcEnd,
    RpcFailure,
    RpcHello,
    RpcProtocolError,
    RpcRequest,
    Unpacker,
    pack,
)

TIMINGS = EngineTimings(0.1, 0.2, 0.3, 0.4, kv_asked_s=0.15)
CALL = Call("POST", "/v1/completions", ((b"x-request-id", b"\xff"),), b"\x00{}", replay_log=((1,), (2, 3)))
ITEMS = [
    Accepted("replica", 3),
    Heartbeat(),
    ResponseStart(200, ((b"content-type", b"text/event-stream"),)),
    ResponseStart(200, (), TIMINGS),
    b"",
    b"data: {}\n\n" * 1000,
    StreamChunk(b"data: \xff\n\n", ((1, 2), (3,))),
    StreamChunk(b"", (), TIMINGS),
    RpcFailure("engine_down", "killed"),
    RpcEnd(),
    RpcHello("key"),
    RpcRequest(CALL, "router", 7),
    RpcRequest(Call("GET", "/version"), "r", 0, "transfer", 1.5),
    RpcCancel(3),
]


def test_an_item_as_bytes() -> None:
    """By hand: kind 1, which is Heartbeat, and the empty map of its fields."""
    assert pack(Heartbeat()) == b"\x01\x00\x00\x00\x01\x80"


@pytest.mark.parametrize("most", [1, 2, 7, 4096, 10**9])
def test_items_in_pieces(most: int) -> None:
    """One byte at a time, in random pieces, all at once."""
    data, unpacker = b"".join(map(pack, ITEMS)), Unpacker()
    found: list[Any] = []
    pieces = random.Random(most)
    while data:
        size = pieces.randint(1, most)
        found += unpacker.feed(data[:size])
        data = data[size:]
    assert found == ITEMS


def test_an_item_that_is_not_whole() -> None:
    """It is not there yet; the rest may come."""
    unpacker, data = Unpacker(), pack(Heartbeat()) + pack(b"12345")
    assert list(unpacker.feed(data[:-1])) == [Heartbeat()]
    assert list(unpacker.feed(data[-1:])) == [b"12345"]


def test_what_is_too_large_is_refused_before_it_has_come() -> None:
    """Of whom nothing is known, no more is kept than may be said."""
    assert list(Unpacker(9).feed(pack(RpcCancel(1)))) == [RpcCancel(1)]
    with pytest.raises(RpcProtocolError, match="the limit is 9"):
        list(Unpacker(9).feed(HEAD.pack(8, 10)))


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(99, 0),
        HEAD.pack(0, 3) + b"\xc1\xc1\xc1",
        HEAD.pack(2, 1) + b"\x80",  # a ResponseStart without a status
        HEAD.pack(8, 1) + b"\x80",  # an RpcRequest of nothing
    ],
)
def test_bytes_that_are_no_item(data: bytes) -> None:
    """Another program than a server or a router."""
    with pytest.raises(RpcProtocolError):
        list(Unpacker().feed(data))
