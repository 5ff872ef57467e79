"""Orders and items as bytes: what comes out is what went in, in whatever pieces it comes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from actors.asgi_call import Accepted, Alive, Call, ResponseStart
from actors.journal import Chunk
from actors.ledger import EngineTimings
from actors.wire import HEAD, Failure, Order, Unpacker, WireError, pack, pack_order, unpack_order

TIMINGS = EngineTimings(0.1, 0.2, 0.3, 0.4, kv_asked_s=0.15)
CALL = Call("POST", "/v1/completions", ((b"x-request-id", b"\xff"),), b"\x00{}", journal=((1,), (2, 3)))
ITEMS = [
    Accepted("replica", 3),
    Alive(),
    ResponseStart(200, ((b"content-type", b"text/event-stream"),)),
    ResponseStart(200, (), TIMINGS),
    b"",
    b"data: {}\n\n" * 1000,
    Chunk(b"data: \xff\n\n", ((1, 2), (3,))),
    Chunk(b"", (), TIMINGS),
    Failure("engine_down", "killed"),
]


def test_an_item_as_bytes() -> None:
    """By hand: kind 1, which is Alive, and the empty map of its fields."""
    assert pack(Alive()) == b"\x01\x00\x00\x00\x01\x80"


@pytest.mark.parametrize("order", [Order(CALL, "router", 7), Order(Call("GET", "/version"), "r", 0, "transfer", 1.5)])
def test_orders(order: Order) -> None:
    """Both roles' calls."""
    assert unpack_order(pack_order(order)) == order


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
    assert unpacker.empty


def test_an_item_that_is_not_whole() -> None:
    """It is not there yet, and the unpacker says that it waits for the rest."""
    unpacker = Unpacker()
    assert list(unpacker.feed(pack(Alive()) + pack(b"12345")[:-1])) == [Alive()]
    assert not unpacker.empty


@pytest.mark.parametrize(
    "data",
    [
        HEAD.pack(99, 0),
        HEAD.pack(0, 3) + b"\xc1\xc1\xc1",
        HEAD.pack(2, 1) + b"\x80",  # a ResponseStart without a status
    ],
)
def test_bytes_that_are_no_item(data: bytes) -> None:
    """Another program than a door."""
    with pytest.raises(WireError):
        list(Unpacker().feed(data))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", pack_order(Order(CALL, "router", 7))[:-1]])
def test_bytes_that_are_no_order(data: bytes) -> None:
    """Another program than a router."""
    with pytest.raises(WireError):
        unpack_order(data)
