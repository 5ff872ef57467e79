"""Calls through a server: the router receives the engine's items, and both may act meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any

import pytest

from actors.engine.asgi_call import call_asgi
from actors.engine_pool import engines as engine_pool
from actors.engine_pool.engine_call import EngineCall
from actors.engine_pool.slots import SlotPool, SlotRequest
from actors.errors import CannotResumeError, EngineDownError, EngineError, RefusedError
from actors.request import Accepted, Call, Heartbeat
from actors.rpc import server
from actors.rpc.address import enable_keepalive
from actors.rpc.messages import Open, RpcHello, RpcRequest
from tests.actors.rpc.world import CALL, ITEMS, WAIT_S, Stranger, World, channels, items, joined, read, settled, until


@pytest.mark.parametrize("side", ["router", "engine"])
def test_a_lost_host_ends_idle_and_busy_connections_after_the_same_time(side: str) -> None:
    """TCP_USER_TIMEOUT overrides the number of keepalive probes (`man 7 tcp`)."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        enable_keepalive(listener)
        with socket.create_connection(listener.getsockname()) as router, listener.accept()[0] as engine:
            enable_keepalive(router)
            connection = router if side == "router" else engine
            option = partial(connection.getsockopt, socket.IPPROTO_TCP)
            probes_s = option(socket.TCP_KEEPIDLE) + option(socket.TCP_KEEPCNT) * option(socket.TCP_KEEPINTVL)
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert option(socket.TCP_USER_TIMEOUT) == 1000 * probes_s


@pytest.mark.parametrize(
    ("path", "error"), [("dies", EngineDownError), ("cannot", CannotResumeError), ("breaks", EngineError)]
)
async def test_a_call_that_fails(world: World, path: str, error: type[Exception]) -> None:
    async with AsyncExitStack() as stack:
        call = await world.call(path, stack)
        found: list[Any] = []
        with pytest.raises(error):
            await read(call, found)
    assert joined(found) == joined(ITEMS)
    await world.at_rest()


@pytest.mark.parametrize("came", range(len(ITEMS) + 1))
async def test_a_cancelled_call_ends_in_the_engine(world: World, came: int) -> None:
    """Cancel a call before its connection is open, after any item, or during a wait for the next
    one.
    """
    async with AsyncExitStack() as stack:
        call = await world.call("hangs", stack)
        for _ in range(came):
            await call.__anext__()
        reading = asyncio.create_task(items(call))
        await asyncio.sleep(0.02 if came else 0)
        call.cancel()
        with pytest.raises(EngineDownError):
            await asyncio.wait_for(reading, WAIT_S)
    await world.at_rest()


async def test_a_full_engine_refuses(world: World) -> None:
    """The server refuses calls while all slots are taken, and accepts one when a call has ended."""
    async with AsyncExitStack() as stack:
        calls = [await world.call("hangs", stack) for _ in range(2)]
        for call in calls:
            assert isinstance(await call.__anext__(), Accepted)
        refused = await world.call("ends", stack)
        with pytest.raises(RefusedError, match="2 sequences"):
            await refused.__anext__()
        calls[0].cancel()
        await world.has(1)
        assert joined(await items(await world.call("ends", stack))) == joined(ITEMS)
        calls[1].cancel()
    await world.at_rest()


async def test_sequences_fill_an_engine(world: World) -> None:
    """A call counts as many slots as it has sequences."""
    async with AsyncExitStack() as stack:
        slot = await world.engines.take(SlotRequest(sequences=3))
        stack.callback(world.engines.give_back, slot)
        many: Any = world.engines.dispatch(slot, Call("POST", "hangs", body=b"{}", sequences=3))
        assert isinstance(await many.__anext__(), Accepted)
        assert world.server.ongoing == 3
        other: Any = world.engines.dispatch(slot, Call("POST", "ends", body=b"{}"))
        with pytest.raises(RefusedError, match="3 sequences"):
            await other.__anext__()
        many.cancel()
    await world.at_rest()


async def test_an_engine_that_leaves(world: World) -> None:
    """The engine completes running calls and refuses new ones; the router calls it no more."""
    async with AsyncExitStack() as stack:
        running = await world.call("waits", stack)
        await running.__anext__()
        draining = asyncio.create_task(world.server.drain())
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="stopping"):
            await (await world.call("ends", stack)).__anext__()
        assert not draining.done()
        world.served.go_on.set()
        await items(running)
        await asyncio.wait_for(draining, WAIT_S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await world.engines.take()


async def test_a_stopping_router_keeps_no_engine_that_others_replace(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a rolling update Serve lists other engines: the stopping one need not wait for routers."""
    engines = dict(engine_pool.replicas_of("any"))
    world.engines.leave()
    async with AsyncExitStack() as stack:
        await items(await world.call("ends", stack))  # the engine has received KEEP
    stopping = asyncio.create_task(world.server.drain())
    await asyncio.sleep(0.1)
    assert not stopping.done()
    monkeypatch.setattr(engine_pool, "replicas_of", lambda _: {"other": engines["e"]})
    await asyncio.wait_for(stopping, WAIT_S)


async def test_an_engine_that_has_left_cannot_be_kept(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopping router does not call an engine that refuses calls before it receives KEEP."""
    engines = engine_pool.replicas_of("any")
    await world.server.drain()
    monkeypatch.setattr(engine_pool, "replicas_of", lambda _: {})
    monkeypatch.setattr(engine_pool, "last_replicas_of", lambda _: engines)
    assert not world.engines.has_engines()
    world.engines.leave()
    await until(lambda: not world.engines.has_engines())


async def test_the_last_answer_of_an_engine_that_stops(world: World) -> None:
    """The answer arrives completely, although the server closes as soon as it has no call."""
    async with AsyncExitStack() as stack:
        running = [await world.call("waits", stack) for _ in range(2)]
        reading = [asyncio.create_task(items(call)) for call in running]
        await world.has(2)

        async def stop() -> None:
            await world.server.drain()
            await world.server.close()

        stopping = asyncio.create_task(stop())
        world.served.go_on.set()
        for task in reading:
            assert joined(await asyncio.wait_for(task, WAIT_S)) == joined(ITEMS)
        await asyncio.wait_for(stopping, WAIT_S)


async def test_a_server_that_closes(world: World) -> None:
    """Calls end with the server, and no task is left."""
    async with AsyncExitStack() as stack:
        calls = [await world.call("hangs", stack) for _ in range(2)]
        for call in calls:
            await call.__anext__()
        await world.server.close()
        for call in calls:
            with pytest.raises(EngineDownError):
                await asyncio.wait_for(read(call, []), WAIT_S)
    await world.at_rest()
    assert not world.server._connections  # noqa: SLF001
    async with asyncio.timeout(WAIT_S):
        while True:  # with Python 3.12, uvloop reports the end a round later
            if not channels(world.engines)[0]:
                break
            await asyncio.sleep(0.005)


async def test_the_queue_of_routers_is_known(world: World) -> None:
    async with AsyncExitStack() as stack:
        await items(await world.call("ends", stack))
        assert world.server.queued() == 0
        async with Stranger(world) as router:
            router.say(RpcHello(1, world.address.key), Open(1, RpcRequest(CALL, "another router", 5)))
            await router.answer(1)
        assert world.server.queued() == 5


async def test_a_sign_of_life_is_nothing_to_wait_for(world: World) -> None:
    """A reader that checks for more items before it waits would otherwise wait after it."""
    call = EngineCall("decode", await world.engines.take(), SlotPool(dict))
    assert not call.has_items
    for item in (Heartbeat(), b"first", Heartbeat(), b"second", Heartbeat()):
        call.received(item)
    for said, more in ((b"first", True), (b"second", False)):
        assert (await call.next(), call.has_items) == (said, more)
    call.ended(None)
    assert call.over


async def test_a_large_body(world: World) -> None:
    """A router has admitted it: the server has no limit of its own."""
    body = bytes(20 << 20)
    async with AsyncExitStack() as stack:
        slot = await world.engines.take()
        stack.callback(world.engines.give_back, slot)
        await items(world.engines.dispatch(slot, Call("POST", "ends", body=body)))
    (request,) = world.served.requests
    assert request.call.body == body


async def test_routers_that_are_gone_are_forgotten(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts each start of a router as another router."""
    monkeypatch.setattr(server, "REMEMBERED_S", 0)
    async with Stranger(world) as router:
        router.say(RpcHello(1, world.address.key))
        for number in range(6):
            router.say(Open(number + 1, RpcRequest(CALL, str(number), 1)))
            await router.answer(number + 1)
    assert not world.server._queued  # noqa: SLF001


EVENTS, EVENT_BYTES = 24_000, 700
"""16.8 MB: a stream with logprobs, or 128 answers at once."""
MOST_BYTES = 4 * 10**6


class Application:
    """Stream events as fast as `send` returns, after the headers of a stream."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(EVENTS if scope["path"] == "large" else 100):
            await send({"type": "http.response.body", "body": b"x" * EVENT_BYTES, "more_body": True})
            self.sent_bytes += EVENT_BYTES if scope["path"] == "large" else 0
            if number % 50 == 0:
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def test_a_paused_stream_stops_its_generator_only(world: World) -> None:
    """At most MOST_BYTES are in flight, no piece takes long to join, and another stream ends
    meanwhile.
    """
    application = Application()

    async def serve(request: RpcRequest, _: Any) -> AsyncGenerator[Any, None]:
        yield Accepted("e", 1)
        async with aclosing(call_asgi(application, request.call)) as answer:
            async for item in answer:
                yield item

    world.served.instead = serve
    async with AsyncExitStack() as stack:
        slow = await world.call("large", stack)
        first = [await anext(slow), await anext(slow), await anext(slow)]
        before = await settled(lambda: application.sent_bytes)
        assert before < MOST_BYTES
        other = await items(await world.call("small", stack))
        assert sum(len(item) for item in other if isinstance(item, bytes)) == 100 * EVENT_BYTES
        assert application.sent_bytes == before, "the slow stream made no progress"
        pieces = [item for item in first + await items(slow) if isinstance(item, bytes)]
    assert sum(map(len, pieces)) == EVENTS * EVENT_BYTES
    assert max(map(len, pieces)) < 2**18, "joining such a piece takes microseconds"
    await world.at_rest()


async def test_a_cancelled_call_wakes_its_application(world: World) -> None:
    """An application that waits in `send` ends when its reader disconnects."""
    ended = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await asyncio.wait_for(receive(), None))["type"] != "http.disconnect":
                for _ in range(1000):
                    await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        finally:
            ended.set()

    answer = call_asgi(application, Call("POST", "/"), disconnect_s=2 * WAIT_S)
    await anext(answer)
    await anext(answer)
    await asyncio.wait_for(answer.aclose(), WAIT_S)
    assert ended.is_set()
