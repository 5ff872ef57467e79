"""A router's connections to a server: when they are used again, when they end, and when the engine has to wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from actors.engine_pool.engines import EngineCall, Slot
from actors.engine_pool.slots import SlotPool
from actors.errors import EngineDownError
from actors.request import Accepted
from actors.router.leg import Leg
from actors.rpc import client, server_connection
from actors.rpc.address import RpcAddress
from actors.rpc.messages import HEAD, RpcEnd, RpcFailure, pack
from tests.actors.rpc.world import CALL, ITEMS, PIECE_BYTES, POURED, World, items, joined, read


@asynccontextmanager
async def elsewhere(world: World, sent: bytes, stays: bool = False) -> AsyncGenerator[EngineCall, None]:
    """A call to somebody who answers whatever is said with `sent`, and then hangs up unless it `stays`."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(sent)
        await (reader.read() if stays else writer.drain())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, AsyncExitStack() as stack:
        slot = await world.engines.take()
        stack.callback(world.engines.give_back, slot)
        address = RpcAddress("127.0.0.1", server.sockets[0].getsockname()[1], "key")
        yield world.engines.dispatch(Slot("e", address, slot.metadata), CALL)


async def test_a_router_learns_that_its_call_is_taken(world: World) -> None:
    """Though the engine says nothing else for long."""
    async with AsyncExitStack() as stack:
        call = await world.call("is silent", stack)
        assert await asyncio.wait_for(anext(call), 5) == Accepted("e", 1)
        call.cancel()
    await world.at_rest()


async def test_small_news_go_with_what_follows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not lost, stay in request, and come before an end."""
    monkeypatch.setattr(server_connection, "LINGER_S", 60)
    async with AsyncExitStack() as stack:
        assert joined(await asyncio.wait_for(items(await world.call("ends", stack)), 5)) == joined(ITEMS)
        silent = await world.call("is silent", stack)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(silent), 0.1)
        silent.cancel()
        await world.at_rest()
        monkeypatch.setattr(SlotPool, "maybe_full", lambda *_: True)
        maybe_full = await world.call("is silent", stack)
        assert await asyncio.wait_for(anext(maybe_full), 5) == Accepted("e", 1), "its router waits for that"
        maybe_full.cancel()
    await world.at_rest()


async def test_a_call_is_sent_before_it_is_received(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is another process, and may be at work before the router's goes on."""
    send, received_at = client.ConnectionPool.call, []

    def receive(*call: Any) -> None:
        received_at.append(time.monotonic())
        send(*call)

    monkeypatch.setattr(client.ConnectionPool, "call", receive)
    async with AsyncExitStack() as stack:
        leg = Leg("decode", await world.call("/", stack))
        assert leg.timestamps.sent_at <= received_at[0]


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        pack(Accepted("e", 1))[:-1],
        HEAD.pack(99, 0),
        HEAD.pack(0, 1) + b"\xff",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        pack(RpcFailure("stranger", "another key")),
    ],
)
async def test_an_answer_that_breaks_off(world: World, sent: bytes) -> None:
    """A process that is killed, or one that is no server."""
    async with elsewhere(world, sent) as call:
        with pytest.raises(EngineDownError, match="e: "):
            await asyncio.wait_for(read(call, []), 5)
    assert world.engines.snapshot().open == 0


async def test_what_comes_after_the_end_is_no_answer(world: World) -> None:
    """A connection whose other side has lost count is not used again."""
    said = pack(Accepted("e", 1)) + pack(RpcEnd()) + pack(b"of whom?")
    async with elsewhere(world, said, stays=True) as call:
        assert await items(call) == [Accepted("e", 1)]
        await asyncio.sleep(0.2)
        assert world.engines.snapshot().open == 0


async def test_a_cancelled_call_leaves_its_connection(world: World) -> None:
    """To the next one: prefill legs are cancelled when their KV has arrived."""
    async with AsyncExitStack() as stack:
        for _ in range(3):
            call = await world.call("hangs", stack)
            await call.__anext__()
            call.cancel()
            await world.at_rest()
            await asyncio.sleep(0.02)  # its end has to come here
        assert world.engines.snapshot().open == 1
        assert joined(await items(await world.call("ends", stack))) == joined(ITEMS)
    assert world.engines.snapshot().open == 1


async def test_a_call_that_does_not_end(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled in vain: its connection is closed. One that only takes a while keeps it, and nothing cuts it short."""
    async with AsyncExitStack() as stack:
        monkeypatch.setattr(client, "END_S", 5.0)
        slow = await world.call("ends late", stack)
        await slow.__anext__()
        slow.cancel()
        await asyncio.sleep(0.2)
        assert world.served.running == 1
        await world.at_rest()
        await asyncio.sleep(0.02)  # its end has to come here
        assert world.engines.snapshot().open == 1
        monkeypatch.setattr(client, "END_S", 0.1)
        slow = await world.call("ends late", stack)
        await slow.__anext__()
        slow.cancel()
        await asyncio.sleep(0.3)
        assert (world.engines.snapshot().open, world.served.running) == (0, 1)
        await world.at_rest()


async def test_a_connection_is_not_kept_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bursts leave many."""
    monkeypatch.setattr(client, "IDLE_CONNECTION_S", 0.1)
    async with AsyncExitStack() as stack:
        both = [await world.call("ends", stack) for _ in range(2)]
        await asyncio.gather(*map(items, both))
        assert world.engines.snapshot().open == 2
        await asyncio.sleep(0.3)
        assert world.engines.snapshot().open == 0
        assert world.engines.snapshot().idle == 0


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
        assert call.unread_bytes < 2 * client.UNREAD_BYTES
        found = await items(call)
    assert sum(len(item) for item in found if isinstance(item, bytes)) == POURED * PIECE_BYTES + len(ITEMS[-1])
    await world.at_rest()


async def test_a_router_that_closes_while_it_connects(world: World) -> None:
    """Who waits for the call is told."""
    async with AsyncExitStack() as stack:
        call = await world.call("ends", stack)
        reading = asyncio.create_task(items(call))
        await world.engines.close()
        with pytest.raises(EngineDownError, match="connecting timed out"):
            await asyncio.wait_for(reading, 5)
    assert not world.served.requests
