"""Calls through a real door: sockets, an engine's generator on one side, what a router reads on the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from actors import engines as module
from actors.asgi_call import Accepted, Alive, Call, ResponseStart
from actors.door import MOST_ROUTERS, Address, Door, announced
from actors.engine import EngineDownError
from actors.engines import EngineError, Engines
from actors.journal import CannotResumeError, Chunk
from actors.leg import RefusedError
from actors.routing import Engine
from actors.wire import Order

CALL = Call("POST", "/v1/completions", body=b"{}")
ITEMS = [Accepted("e", 1), Alive(), ResponseStart(200, ()), Chunk(b"one", ((1,),)), b"two" * 100_000]


class Served:
    """An engine's generator; it does what the path of a call says, and counts the calls that run."""

    def __init__(self) -> None:
        self.running = 0
        self.orders: list[Order] = []
        self.go_on = asyncio.Event()

    async def __call__(self, order: Order) -> AsyncGenerator[Any, None]:
        self.orders.append(order)
        self.running += 1
        try:
            for item in ITEMS:
                yield item
            match order.call.path:
                case "hangs":
                    await asyncio.sleep(60)
                case "waits":
                    await self.go_on.wait()
                case "dies":
                    raise EngineDownError("killed")
                case "cannot":
                    raise CannotResumeError("no record")
                case "breaks":
                    raise KeyError("a bug")
        finally:
            self.running -= 1


class World:
    """A door with two places, and a router's side of it."""

    def __init__(self, served: Served, door: Door, address: Address, engines: Engines) -> None:
        self.served, self.door, self.address, self.engines = served, door, address, engines

    async def call(self, path: str, stack: AsyncExitStack, **more: Any) -> module.EngineCall:
        place = await stack.enter_async_context(self.engines.choose_replica())
        return self.engines.dispatch(place, Call("POST", path, body=b"{}"), **more)

    async def at_rest(self) -> None:
        await self.has(0)
        assert not self.served.running

    async def has(self, ongoing: int) -> None:
        async with asyncio.timeout(5):
            while True:
                if self.door.ongoing == ongoing:
                    return
                await asyncio.sleep(0.005)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[World, None]:
    served = Served()
    door = Door(served, places=2)
    address = await door.open("127.0.0.1", 0)
    known = {"e": Engine(address, 9, 9, announced(address, 9))}
    monkeypatch.setattr(module, "engines_of", lambda _: known)
    handle: Any = SimpleNamespace(deployment_id="engines")
    handle.options = lambda: handle
    engines = Engines(handle)
    yield World(served, door, address, engines)
    await engines.close()
    await door.close()


async def read(call: module.EngineCall, found: list[Any]) -> None:
    """Add the items that come to `found`."""
    while True:
        try:
            found.append(await call.__anext__())
        except StopAsyncIteration:
            return


async def items(call: module.EngineCall) -> list[Any]:
    """All of them."""
    found: list[Any] = []
    await read(call, found)
    return found


def joined(found: list[Any]) -> list[Any]:
    """With pieces of the body that followed each other as one."""
    return [item for item in found if not isinstance(item, bytes)] + [
        b"".join(i for i in found if isinstance(i, bytes))
    ]


async def test_a_call(world: World) -> None:
    """All items in order; one after the other over one connection, as the answer was read to its end."""
    async with AsyncExitStack() as stack:
        for _ in range(3):
            assert joined(await items(await world.call("ends", stack))) == joined(ITEMS)
    assert {order.call for order in world.served.orders} == {Call("POST", "ends", body=b"{}")}
    assert world.engines._session is not None
    assert isinstance(world.engines._session.connector, aiohttp.TCPConnector)
    assert sum(map(len, world.engines._session.connector._conns.values())) == 1
    await world.at_rest()


@pytest.mark.parametrize(
    ("path", "error"), [("dies", EngineDownError), ("cannot", CannotResumeError), ("breaks", EngineError)]
)
async def test_a_call_that_fails(world: World, path: str, error: type[Exception]) -> None:
    """What was answered until then is there, then the error that it was."""
    async with AsyncExitStack() as stack:
        call = await world.call(path, stack)
        found: list[Any] = []
        with pytest.raises(error):
            await read(call, found)
    assert joined(found) == joined(ITEMS)
    await world.at_rest()


@pytest.mark.parametrize("came", range(len(ITEMS) + 1))
async def test_a_cancelled_call_ends_in_the_engine(world: World, came: int) -> None:
    """Before its connection is made, after any item, and while somebody waits for the next one."""
    async with AsyncExitStack() as stack:
        call = await world.call("hangs", stack)
        for _ in range(came):
            await call.__anext__()
        reading = asyncio.create_task(items(call))
        await asyncio.sleep(0.02 if came else 0)
        call.cancel()
        with pytest.raises(EngineDownError):
            await asyncio.wait_for(reading, 5)
    await world.at_rest()


async def test_a_reader_that_is_cancelled_can_read_on(world: World) -> None:
    """A deadline between two items loses none of them."""
    async with AsyncExitStack() as stack:
        call = await world.call("waits", stack)
        found: list[Any] = []
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(call, found), 0.3)
        world.served.go_on.set()
        assert joined(found + await items(call)) == joined(ITEMS)


async def test_a_full_engine_refuses(world: World) -> None:
    """Beyond its places, which another router may have taken; and takes calls again when one has ended."""
    async with AsyncExitStack() as stack:
        calls = [await world.call("hangs", stack) for _ in range(2)]
        for call in calls:
            assert isinstance(await call.__anext__(), Accepted)
        refused = await world.call("ends", stack)
        with pytest.raises(RefusedError, match="2 requests"):
            await refused.__anext__()
        calls[0].cancel()
        await world.has(1)
        assert joined(await items(await world.call("ends", stack))) == joined(ITEMS)
        calls[1].cancel()
    await world.at_rest()


async def test_an_engine_that_leaves(world: World) -> None:
    """Ends what it has, refuses what comes, and is asked no more."""
    async with AsyncExitStack() as stack:
        running = await world.call("waits", stack)
        await running.__anext__()
        draining = asyncio.create_task(world.door.drain())
        await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="stopped"):
            await (await world.call("ends", stack)).__anext__()
        assert not draining.done()
        world.served.go_on.set()
        await items(running)
        await asyncio.wait_for(draining, 5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await world.engines.choose_replica().__aenter__()


async def test_a_router_that_is_gone(world: World) -> None:
    """Its calls end with its connections."""
    stack = AsyncExitStack()
    calls = [await world.call("hangs", stack) for _ in range(2)]
    for call in calls:
        await call.__anext__()
    await world.engines.close()
    await world.at_rest()
    await stack.aclose()


async def test_an_engine_that_is_not_there(world: World) -> None:
    """Nobody listens where it was."""
    await world.door.close()
    async with AsyncExitStack() as stack:
        with pytest.raises(EngineDownError, match="e is gone"):
            await (await world.call("ends", stack)).__anext__()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n\x00\x00\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\x00\x00",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n\xff\x00\x00\x00\x00",
        b"SSH-2.0\r\n",
    ],
)
async def test_an_answer_that_breaks_off(world: World, sent: bytes) -> None:
    """A process that is killed, or one that is no door."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, AsyncExitStack() as stack:
        place = await stack.enter_async_context(world.engines.choose_replica())
        elsewhere = Address("127.0.0.1", server.sockets[0].getsockname()[1], "key")
        call = world.engines.dispatch(module.Place("e", elsewhere, place.metadata), CALL)
        with pytest.raises(EngineDownError):
            await call.__anext__()


async def test_who_has_no_key_gets_nothing(world: World) -> None:
    """Nor who sends something else than an order."""
    async with aiohttp.ClientSession() as session:
        for headers, data, status in (
            ({}, b"", 401),
            ({"Authorization": "wrong"}, b"", 401),
            ({"Authorization": world.address.key}, b"{}", 400),
        ):
            async with session.post(world.address.url, headers=headers, data=data) as reply:
                assert reply.status == status
        async with session.get(world.address.url) as reply:
            assert reply.status == 405
    assert not world.served.orders


async def test_it_listens_where_it_is_told(world: World) -> None:
    """And nowhere else; a port that is taken is an OSError."""
    with pytest.raises(OSError, match="in use"):
        await Door(world.served, 1).open("127.0.0.1", world.address.port)
    other = [one for one in ("127.0.0.2", "127.1.1.1") if socket.socket().connect_ex((one, world.address.port)) == 0]
    assert not other


async def test_the_queue_of_routers_is_known(world: World) -> None:
    """As each has said with its last call."""
    async with AsyncExitStack() as stack:
        await items(await world.call("ends", stack))
        assert world.door.queued() == 0
        order = Order(CALL, "another router", 5)
        async with aiohttp.ClientSession() as session:
            from actors.wire import pack_order

            headers = {"Authorization": world.address.key}
            async with session.post(world.address.url, headers=headers, data=pack_order(order)) as reply:
                await reply.read()
        assert world.door.queued() == 5


async def test_a_prefill_leg_carries_its_transfer(world: World) -> None:
    """What the engine is to hold, and how long."""
    async with AsyncExitStack() as stack:
        await items(await world.call("ends", stack, transfer_id="t", hold_s=2.0))
    (order,) = world.served.orders
    assert (order.transfer_id, order.hold_s) == ("t", 2.0)


async def test_a_large_body(world: World) -> None:
    """A router has let it in: the door has no limit of its own."""
    body = bytes(20 << 20)
    async with AsyncExitStack() as stack:
        place = await stack.enter_async_context(world.engines.choose_replica())
        await items(world.engines.dispatch(place, Call("POST", "ends", body=body)))
    (order,) = world.served.orders
    assert order.call.body == body


async def test_routers_that_are_gone_are_forgotten(world: World) -> None:
    """Each start of a router is another one to the door."""
    for router in range(MOST_ROUTERS * 2):
        world.door._told(Order(CALL, str(router), 1), now=float(router))
    assert len(world.door._queued) <= MOST_ROUTERS
