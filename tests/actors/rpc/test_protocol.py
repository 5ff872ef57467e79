"""Both sides of the protocol without sockets: versions, the states of streams, and credit."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from actors.request import Accepted, Call, FirstTokenChunk, Heartbeat, StreamChunk, TokenChunk
from actors.rpc.messages import (
    Ask,
    CancelStream,
    Credit,
    EndStream,
    Open,
    Reply,
    RpcProtocolError,
    RpcRequest,
    RpcWelcome,
    StreamItem,
    encode,
)
from actors.rpc.protocol import (
    CALLER_TABLE,
    ENGINE_TABLE,
    GRANT_BYTES,
    ITEM_BYTES,
    NEWEST_VERSION,
    PIECE_BYTES,
    WINDOW_BYTES,
    CallerProtocol,
    EngineProtocol,
    StreamState,
    common_version,
    item_bytes,
    pieces,
)

REQUEST = RpcRequest(Call("POST", "/"), "router", 0)


def pair() -> tuple[CallerProtocol, EngineProtocol]:
    """Return two sides that have agreed on a version."""
    router, engine = CallerProtocol("key"), EngineProtocol("key")
    assert list(engine.receive(router.take())) == []
    assert list(router.receive(engine.take())) == []
    assert router.version == engine.version == NEWEST_VERSION
    return router, engine


@pytest.mark.parametrize(
    ("offered", "newest", "oldest", "common"),
    [
        (1, 1, 1, 1),
        (2, 1, 1, 1),
        (9, 1, 1, 1),
        (0, 1, 1, None),
        (1, 2, 1, 1),
        (3, 2, 1, 2),
        (1, 3, 2, None),
        (2, 3, 2, 2),
    ],
)
def test_versions(offered: int, newest: int, oldest: int, common: int | None) -> None:
    """Both sides use the newest common version; each supports its newest and the one before."""
    assert common_version(offered, newest, oldest) == common


def test_a_call_by_hand() -> None:
    """Only the RpcHello precedes the RpcWelcome; then each side receives the other's messages."""
    router, engine = CallerProtocol("key"), EngineProtocol("key")
    assert router.open(REQUEST) == 1
    assert list(engine.receive(router.take())) == []
    assert router.take() == b""
    assert list(router.receive(engine.take())) == []
    assert list(engine.receive(router.take())) == [Open(1, REQUEST)]
    assert engine.send(1, Accepted("e"), ITEM_BYTES)
    assert engine.send(1, b"one", ITEM_BYTES + 3)
    engine.end(1)
    frame = engine.take()
    assert frame == encode([StreamItem(1, Accepted("e")), StreamItem(1, b"one"), EndStream(1)]), "one frame"
    assert list(router.receive(frame)) == [StreamItem(1, Accepted("e")), StreamItem(1, b"one"), EndStream(1)]
    assert (router.streams, engine.streams, router.take(), engine.take()) == (0, 0, b"", b"")


def test_a_method_by_hand() -> None:
    """The result of a method ends its stream."""
    router, engine = pair()
    assert router.ask("double", (21,)) == 1
    assert list(engine.receive(router.take())) == [Ask(1, "double", (21,))]
    engine.reply(1, 42)
    assert list(router.receive(engine.take())) == [Reply(1, 42)]
    assert (router.streams, engine.streams) == (0, 0)


ENGINE_MESSAGES: list[Any] = [Open(1, REQUEST), Ask(1, "m", ()), CancelStream(1), Credit(1, 1)]
ROUTER_MESSAGES: list[Any] = [StreamItem(1, Heartbeat()), Reply(1, 2), EndStream(1)]


def engine_in(state: StreamState) -> EngineProtocol:
    """Return an engine whose stream 1 is in `state`."""
    router, engine = pair()
    if state is not StreamState.NEW:
        router.ask("m", ()) if state is StreamState.ASKED else router.open(REQUEST)
        list(engine.receive(router.take()))
    if state is StreamState.CANCELLED:
        router.cancel(1)
        list(engine.receive(router.take()))
    if state is StreamState.ENDED:
        engine.end(1)
    return engine


def router_in(state: StreamState) -> CallerProtocol:
    """Return a router whose stream 1 is in `state`."""
    router, _ = pair()
    if state is not StreamState.NEW:
        router.ask("m", ()) if state is StreamState.ASKED else router.open(REQUEST)
        router.take()
    if state is StreamState.CANCELLED:
        router.cancel(1)
    if state is StreamState.ENDED:
        list(router.receive(encode([EndStream(1)])))
    return router


@pytest.mark.parametrize(("state", "message"), list(itertools.product(StreamState, ENGINE_MESSAGES + ROUTER_MESSAGES)))
def test_the_engines_table(state: StreamState, message: Any) -> None:
    """Each message in each state: passed on, ignored, or refused, as in the table."""
    check(engine_in(state), ENGINE_TABLE.get((state, type(message))), message)


@pytest.mark.parametrize(("state", "message"), list(itertools.product(StreamState, ENGINE_MESSAGES + ROUTER_MESSAGES)))
def test_the_routers_table(state: StreamState, message: Any) -> None:
    """Each message in each state: passed on, ignored, or refused, as in the table."""
    check(router_in(state), CALLER_TABLE.get((state, type(message))), message)


def check(side: Any, row: tuple[StreamState, bool] | None, message: Any) -> None:
    if row is None:
        with pytest.raises(RpcProtocolError, match=f"unexpected {type(message).__name__}"):
            list(side.receive(encode([message])))
        return
    following, wanted = row
    assert list(side.receive(encode([message]))) == ([message] if wanted else [])
    assert side.streams == (0 if following is StreamState.ENDED else 1)


def test_a_call_that_is_cancelled_before_it_is_sent() -> None:
    """A call cancelled before the RpcWelcome is never sent."""
    router = CallerProtocol("key")
    router.take()
    router.cancel(router.open(REQUEST))
    list(router.receive(encode([RpcWelcome(1)])))
    assert (router.take(), router.streams) == (b"", 0)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES, 10 * PIECE_BYTES - 1])
def test_pieces_of_an_item(size: int) -> None:
    """Each piece fits its frame, all together equal the item, and tokens precede their bytes."""
    body = random.Random(size).randbytes(size)
    for item in (body, TokenChunk(body, ((1, 2),)), FirstTokenChunk(body, ((1,),), None, 7)):
        parts: list[Any] = list(pieces(item))
        bodies = [part.body if isinstance(part, StreamChunk) else part for part in parts]
        assert b"".join(bodies) == body
        assert max(map(len, bodies)) <= PIECE_BYTES
        assert type(parts[0]) is type(item)
        assert getattr(parts[0], "prompt_tokens", 0) == getattr(item, "prompt_tokens", 0)
        assert all(isinstance(part, bytes) for part in parts[1:])


@pytest.mark.parametrize("seed", range(20))
def test_credit(seed: int) -> None:
    """Readers of three streams that pause and continue: no stream exceeds its window, and each
    gets all data.
    """
    rng = random.Random(seed)
    router, engine = pair()
    streams = [router.open(REQUEST) for _ in range(3)]
    list(engine.receive(router.take()))
    waiting = {one: [bytes(rng.choice([0, 1, 900, PIECE_BYTES])) for _ in range(40)] for one in streams}
    unread: dict[int, list[bytes]] = {one: [] for one in streams}
    read, consumed = dict.fromkeys(streams, 0), dict.fromkeys(streams, 0)
    for _ in range(100_000):
        stream = rng.choice(streams)
        if rng.random() < 0.5:
            if waiting[stream] and engine.send(stream, waiting[stream][0], item_bytes(waiting[stream][0])):
                waiting[stream].pop(0)
            for message in router.receive(engine.take()):
                assert isinstance(message, StreamItem)
                unread[message.stream].append(message.item)  # type: ignore[arg-type]
        elif unread[stream] and rng.random() < 0.3:
            consumed[stream] += item_bytes(unread[stream].pop(0))
            if consumed[stream] >= GRANT_BYTES:
                router.grant(stream, consumed[stream])
                consumed[stream] = 0
            read[stream] += 1
            list(engine.receive(router.take()))
        assert sum(map(item_bytes, unread[stream])) <= WINDOW_BYTES
        if set(read.values()) == {40}:
            return
    raise AssertionError(f"a stream starves: {read}")


def test_credit_by_hand() -> None:
    """A window of four pieces; the credit that the router holds back leaves room for the largest
    item.
    """
    router, engine = pair()
    router.open(REQUEST)
    list(engine.receive(router.take()))
    piece, size = bytes(PIECE_BYTES), PIECE_BYTES + ITEM_BYTES
    assert [engine.send(1, piece, size) for _ in range(4)] == [True, True, True, False]
    assert engine.send(1, b"", ITEM_BYTES)
    list(router.receive(engine.take()))
    router.grant(1, size)
    assert list(engine.receive(router.take())) == [Credit(1, size)]
    assert engine.send(1, piece, size)
    assert GRANT_BYTES + size <= WINDOW_BYTES
