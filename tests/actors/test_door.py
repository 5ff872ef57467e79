"""Calls through a real door: sockets, an engine's generator on one side, what a router reads on the other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from actors import caller, lines
from actors import engines as module
from actors.address import Address
from actors.asgi_call import Accepted, Alive, Call, ResponseStart
from actors.door import MOST_ROUTERS, Door, announced
from actors.engine import EngineDownError
from actors.engines import EngineError, Engines
from actors.journal import CannotResumeError, Chunk
from actors.leg import RefusedError
from actors.routing import Engine
from actors.wire import HEAD, Cancel, End, Failure, Hello, Order, Unpacker, pack

CALL = Call("POST", "/v1/completions", body=b"{}")
ITEMS: list[Any] = [Accepted("e", 1), Alive(), ResponseStart(200, ()), Chunk(b"one", ((1,),)), b"two" * 100_000]
# What it says to use instead would double the tests of all files in this folder.
pytestmark = pytest.mark.filterwarnings("ignore:Overriding the:pytest.PytestDeprecationWarning")

POURED, PIECE_BYTES = 1000, 2**16


class Served:
    """An engine's generator; it does what the path of a call says, and counts the calls that run."""

    def __init__(self) -> None:
        self.running = 0
        self.poured = 0
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
                case "pours":
                    for _ in range(POURED):
                        self.poured += 1
                        yield bytes(PIECE_BYTES)
                case "ends late":
                    try:
                        await asyncio.sleep(60)
                    finally:
                        await asyncio.sleep(0.5)
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


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Any:
    """Actors run on uvloop, whose transports differ in what they forgive."""
    return request.param()


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
    assert len(world.engines._lines) == 1
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
        with pytest.raises(EngineDownError, match="e: it takes no connection"):
            await (await world.call("ends", stack)).__anext__()


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        pack(Accepted("e", 1))[:-1],
        HEAD.pack(99, 0),
        HEAD.pack(0, 1) + b"\xff",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        pack(Failure("stranger", "another key")),
    ],
)
async def test_an_answer_that_breaks_off(world: World, sent: bytes) -> None:
    """A process that is killed, or one that is no door."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, AsyncExitStack() as stack:
        place = await stack.enter_async_context(world.engines.choose_replica())
        elsewhere = Address("127.0.0.1", server.sockets[0].getsockname()[1], "key")
        call = world.engines.dispatch(module.Place("e", elsewhere, place.metadata), CALL)
        with pytest.raises(EngineDownError, match="e: "):
            await asyncio.wait_for(read(call, []), 5)
    assert len(world.engines._lines) == 0


async def test_what_comes_after_the_end_is_no_answer(world: World) -> None:
    """A connection whose other side has lost count is not used again."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(pack(Accepted("e", 1)) + pack(End()) + pack(b"of whom?"))
        await reader.read()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, AsyncExitStack() as stack:
        place = await stack.enter_async_context(world.engines.choose_replica())
        elsewhere = Address("127.0.0.1", server.sockets[0].getsockname()[1], "key")
        call = world.engines.dispatch(module.Place("e", elsewhere, place.metadata), CALL)
        assert await items(call) == [Accepted("e", 1)]
        await asyncio.sleep(0.2)
    assert len(world.engines._lines) == 0


async def test_a_cancelled_call_leaves_its_connection(world: World) -> None:
    """To the next one: prefill legs are cancelled when their KV has arrived."""
    async with AsyncExitStack() as stack:
        for _ in range(3):
            call = await world.call("hangs", stack)
            await call.__anext__()
            call.cancel()
            await world.at_rest()
            await asyncio.sleep(0.02)  # its end has to come here
        assert len(world.engines._lines) == 1
        assert joined(await items(await world.call("ends", stack))) == joined(ITEMS)
    assert len(world.engines._lines) == 1


async def test_a_call_that_does_not_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in vain: its connection is closed. One that only takes a while keeps it, and nothing cuts it short."""
    async with AsyncExitStack() as stack:
        monkeypatch.setattr(lines, "END_S", 5.0)
        slow = await world.call("ends late", stack)
        await slow.__anext__()
        slow.cancel()
        await asyncio.sleep(0.2)
        assert world.served.running == 1
        await world.at_rest()
        await asyncio.sleep(0.02)  # its end has to come here
        assert len(world.engines._lines) == 1
        monkeypatch.setattr(lines, "END_S", 0.1)
        slow = await world.call("ends late", stack)
        await slow.__anext__()
        slow.cancel()
        await asyncio.sleep(0.3)
        assert (len(world.engines._lines), world.served.running) == (0, 1)
        await world.at_rest()


async def test_a_connection_is_not_kept_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts leave many."""
    monkeypatch.setattr(lines, "IDLE_LINE_S", 0.1)
    async with AsyncExitStack() as stack:
        both = [await world.call("ends", stack) for _ in range(2)]
        await asyncio.gather(*map(items, both))
        assert len(world.engines._lines) == 2
        await asyncio.sleep(0.3)
        assert len(world.engines._lines) == 0
        assert not world.engines._lines._free


async def test_a_reader_that_does_not_read(world: World) -> None:
    """Has the engine wait, instead of filling the router's memory; then it gets all."""
    async with AsyncExitStack() as stack:
        call = await world.call("pours", stack)
        before = -1
        async with asyncio.timeout(10):
            while before < world.served.poured:
                before = world.served.poured
                await asyncio.sleep(0.3)
        assert 16 < before < POURED
        assert call._unread_bytes < 2 * lines.UNREAD_BYTES
        found = await items(call)
    assert sum(len(item) for item in found if isinstance(item, bytes)) == POURED * PIECE_BYTES + len(ITEMS[-1])
    await world.at_rest()


class Stranger:
    """A connection to the door, by hand."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def __aenter__(self) -> Stranger:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self._world.address.port)
        self._unpacker = Unpacker()
        self._come: list[Any] = []
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.transport.abort()

    def say(self, *said: Any) -> None:
        self.writer.write(b"".join(map(pack, said)))

    async def heard(self) -> Any:
        """The next that the door says; None: it has hung up."""
        async with asyncio.timeout(5):
            while not self._come:
                try:
                    data = await self.reader.read(2**16)
                except ConnectionResetError:
                    return None
                if not data:
                    return None
                self._come += self._unpacker.feed(data)
        return self._come.pop(0)

    async def answer(self) -> list[Any]:
        """Up to its end."""
        found: list[Any] = []
        while (item := await self.heard()) != End():
            assert item is not None
            found.append(item)
        return found


@pytest.mark.parametrize(
    "said",
    [
        pack(Hello("wrong")),
        pack(Hello("")),
        pack(Hello("w\udcff".encode("utf-8", "surrogatepass").decode("latin-1"))),
        pack(Order(CALL, "router", 0)),
        pack(Cancel(1)),
        pack(Alive()),
        HEAD.pack(99, 0),
        HEAD.pack(7, 2**31),
        b"POST /call HTTP/1.1\r\n\r\n",
        bytes(10**7),
    ],
)
async def test_who_has_no_key_gets_nothing(world: World, said: bytes) -> None:
    """Nor who says something else than hello. It is told why, if it has not said too much."""
    async with Stranger(world) as stranger:
        stranger.writer.write(said)
        heard = await stranger.heard()
        assert heard is None or (isinstance(heard, Failure) and heard.kind == "stranger")
        assert await stranger.heard() is None
    assert not world.served.orders
    await asyncio.sleep(0.01)
    assert not world.door._callers


async def test_who_says_nothing_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scanner, or a router that died at once. A router that has said hello may be silent."""
    monkeypatch.setattr(caller, "HELLO_S", 0.2)
    async with Stranger(world) as router, Stranger(world) as silent:
        router.say(Hello(world.address.key))
        assert await silent.heard() == Failure("stranger", "it has said nothing")
        assert await silent.heard() is None
        router.say(Order(CALL, "router", 0))
        assert joined(await router.answer()) == joined(ITEMS)


@pytest.mark.parametrize(
    "said",
    [Hello("again"), Order(CALL, "router", 0), Alive(), Failure("full", "no")],
    ids=["hello", "order", "item", "failure"],
)
async def test_who_says_what_no_router_would(world: World, said: Any) -> None:
    """In the middle of a call: it is let go, and its call ends."""
    async with Stranger(world) as stranger:
        stranger.say(Hello(world.address.key), Order(Call("POST", "hangs"), "router", 0))
        assert isinstance(await stranger.heard(), Accepted)
        stranger.say(said)
        while await stranger.heard() is not None:
            pass
    await world.at_rest()


async def test_a_cancel_that_crosses_the_end(world: World) -> None:
    """Is of a call that is over, and not of the next."""
    async with Stranger(world) as router:
        router.say(Hello(world.address.key), Order(CALL, "router", 0))
        await router.answer()
        router.say(Cancel(1), Order(Call("POST", "waits"), "router", 0), Cancel(1))
        for _ in ITEMS:
            await router.heard()
        await asyncio.sleep(0.05)
        assert world.served.running == 1
        router.say(Cancel(2))
        await router.answer()
    await world.at_rest()


async def test_a_call_that_is_cancelled_before_it_has_begun(world: World) -> None:
    """Both in one read: it has an end, as every call has."""
    async with Stranger(world) as router:
        router.say(Hello(world.address.key), Order(CALL, "router", 0), Cancel(1))
        assert await router.answer() == []
        router.say(Order(CALL, "router", 0))
        assert joined(await router.answer()) == joined(ITEMS)
    assert len(world.served.orders) == 1


async def test_a_router_that_closes_while_it_connects(world: World) -> None:
    """Who waits for the call is told."""
    async with AsyncExitStack() as stack:
        call = await world.call("ends", stack)
        reading = asyncio.create_task(items(call))
        await world.engines.close()
        with pytest.raises(EngineDownError, match="not connected to"):
            await asyncio.wait_for(reading, 5)
    assert not world.served.orders


async def test_a_door_that_closes(world: World) -> None:
    """Calls end with it, and nobody is left."""
    async with AsyncExitStack() as stack:
        calls = [await world.call("hangs", stack) for _ in range(2)]
        for call in calls:
            await call.__anext__()
        await world.door.close()
        for call in calls:
            with pytest.raises(EngineDownError):
                await asyncio.wait_for(read(call, []), 5)
    await world.at_rest()
    assert not world.door._callers
    assert len(world.engines._lines) == 0


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
        async with Stranger(world) as router:
            router.say(Hello(world.address.key), Order(CALL, "another router", 5))
            await router.answer()
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
