"""A router's connections to a server: their reuse, their end, and the engine's wait for credit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from actors.engine_pool.slots import Slot
from actors.errors import DeadlineError, EngineDownError, EngineError, SilentError
from actors.request import Accepted
from actors.rpc import client, server_connection
from actors.rpc.address import RpcAddress
from actors.rpc.messages import LENGTH, EndStream, RpcRefused, RpcWelcome, StreamItem, encode
from tests.actors.rpc.world import (
    CALL,
    ITEMS,
    WAIT_S,
    World,
    channels,
    items,
    joined,
    read,
    until,
)


@asynccontextmanager
async def elsewhere(world: World, sent: bytes, stays: bool = False) -> AsyncGenerator[Any, None]:
    """Call a peer that answers any message with `sent`, and then closes the connection unless it
    `stays`.
    """

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(sent)
        await (reader.read() if stays else writer.drain())
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, AsyncExitStack() as stack:
        slot = await world.engines.take()
        stack.callback(world.engines.give_back, slot)
        address = RpcAddress("127.0.0.1", server.sockets[0].getsockname()[1], "key")
        yield world.engines.dispatch(Slot("e", replace(slot.engine, address=address)), CALL)


async def test_a_router_learns_that_its_call_is_taken(world: World) -> None:
    """A message arrives although the engine sends nothing else for long."""
    async with AsyncExitStack() as stack:
        call = await world.call("is silent", stack)
        assert await asyncio.wait_for(anext(call), WAIT_S) == Accepted("e", 1)
        call.cancel()
    await world.at_rest()


async def test_small_news_go_with_what_follows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages are not lost, stay in order, and precede the end of their stream."""
    monkeypatch.setattr(server_connection, "LINGER_S", 60)
    async with AsyncExitStack() as stack:
        assert joined(await asyncio.wait_for(items(await world.call("ends", stack)), WAIT_S)) == joined(ITEMS)
        silent = await world.call("is silent", stack)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(silent), 0.1)
        silent.cancel()
        await world.at_rest()
        maybe_full = await world.call("is silent", stack, maybe_full=True)
        assert await asyncio.wait_for(anext(maybe_full), WAIT_S) == Accepted("e", 1), (
            "a router that believes the engine full waits for Accepted"
        )
        maybe_full.cancel()
    await world.at_rest()


async def test_a_call_is_sent_before_it_is_received(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is another process, and may send before the router's loop continues."""
    send, received_at = client.Channel.call, []

    def receive(*call: Any) -> int:
        received_at.append(time.monotonic())
        return send(*call)

    monkeypatch.setattr(client.Channel, "call", receive)
    async with AsyncExitStack() as stack:
        call = await world.call("/", stack)
        assert call.times.sent_at <= received_at[0]


async def test_a_call_without_an_item_in_time(world: World) -> None:
    """The earlier of two deadlines counts. The call goes on: its end arrives later."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        call = await world.call("waits", stack)
        stack.callback(call.cancel)
        size = 0
        while size < len(ITEMS[-1]):
            item = await call.next(WAIT_S)
            size += len(item) if isinstance(item, bytes) else 0
        for _ in range(2):
            with pytest.raises(SilentError):
                await call.next(0.05)
            with pytest.raises(SilentError):
                await call.next(0.05, loop.time() + WAIT_S)
            with pytest.raises(DeadlineError):
                await call.next(WAIT_S, loop.time() + 0.05)
        world.served.go_on.set()
        assert await call.next(WAIT_S) is None
    await world.at_rest()


TAKEN = StreamItem(1, Accepted("e", 1))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        encode([TAKEN])[:-1],
        encode([TAKEN]),
        encode([RpcWelcome(1), RpcWelcome(1)]),
        encode([RpcWelcome(7)]),
        encode([RpcWelcome(1), StreamItem(2, Accepted("e", 1))]),
        encode([RpcWelcome(1), StreamItem(1, bytes(2**18))]),
        LENGTH.pack(3) + b"\xff\xff\xff",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        encode([RpcRefused("wrong key")]),
    ],
    ids=["nothing", "half", "early", "twice", "version", "stream", "credit", "garbage", "http", "refused"],
)
async def test_an_answer_that_breaks_off(world: World, sent: bytes) -> None:
    """The server is killed, is another program, or violates the protocol."""
    async with elsewhere(world, sent) as call:
        with pytest.raises(EngineDownError, match="e: "):
            await asyncio.wait_for(read(call, []), WAIT_S)
    assert channels(world.engines)[0] == 0


async def test_a_connection_that_closes_before_a_method_is_sent(world: World) -> None:
    """The idle timer may close it then. The method is sent on a new connection."""
    assert await world.engines.tell_all("ping", WAIT_S) == {"e": "e"}
    asking = asyncio.create_task(world.engines.tell_all("ping", WAIT_S))
    closing = asyncio.create_task(world.engines.close())
    assert await asking == {"e": "e"}
    await closing


async def test_an_item_after_the_end(world: World) -> None:
    """The router closes a connection whose engine exceeds its credit."""
    said = encode([RpcWelcome(1), TAKEN, EndStream(1), StreamItem(1, b"of whom?")])
    async with elsewhere(world, said, stays=True) as call:
        assert await items(call) == [Accepted("e", 1)]
        await until(lambda: channels(world.engines)[0] == 0)


async def test_a_cancelled_call_leaves_the_connection_open(world: World) -> None:
    """Prefill legs are cancelled when their KV has arrived."""
    async with AsyncExitStack() as stack:
        for _ in range(3):
            call = await world.call("hangs", stack)
            await call.__anext__()
            call.cancel()
            await world.at_rest()
        assert joined(await items(await world.call("ends", stack))) == joined(ITEMS)
    assert channels(world.engines)[0] == 1


async def test_a_call_that_ends_late(world: World) -> None:
    """While a cancelled call keeps its engine busy, the connection serves other calls."""
    async with AsyncExitStack() as stack:
        slow = await world.call("ends late", stack)
        size = 0
        while size < len(ITEMS[-1]):
            item = await anext(slow)
            size += len(item) if isinstance(item, bytes) else 0
        slow.cancel()
        assert joined(await items(await world.call("ends", stack))) == joined(ITEMS)
        assert world.served.running == 1
        world.served.go_on.set()
        await world.at_rest()
        await until(lambda: channels(world.engines) == (1, 1))


async def test_an_idle_connection_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The router closes an idle connection; the next call opens another one."""
    monkeypatch.setattr(client, "IDLE_CONNECTION_S", 0.1)
    async with AsyncExitStack() as stack:
        for _ in range(2):
            world.served.go_on.clear()
            running = [await world.call("waits", stack) for _ in range(2)]
            await asyncio.gather(*map(anext, running))
            assert channels(world.engines) == (1, 0)
            world.served.go_on.set()
            await asyncio.gather(*map(items, running))
            await until(lambda: channels(world.engines)[0] == 0)


async def test_methods_of_an_engine(world: World) -> None:
    """Methods need no slot; an unknown or failing one is an error of this call only."""

    async def ask(method: str, *arguments: object) -> Any:
        return (await world.engines.tell_all(method, 0.1 if method == "sleep" else WAIT_S, *arguments))["e"]

    assert await ask("double", 21) == 42
    for method, arguments, why in (
        ("triple", (1,), "no method 'triple'"),
        ("double", (None,), "TypeError"),
        ("broken", (), "broken returned a value that msgpack cannot encode"),
    ):
        error = await ask(method, *arguments)
        assert isinstance(error, EngineError)
        assert why in str(error)
    assert isinstance(await ask("sleep"), DeadlineError)
    assert await ask("double", "a") == "aa"
    await world.server.close()
    await asyncio.sleep(0.05)
    assert "connect" in str(await ask("double", 1))


async def test_a_router_that_closes_while_it_connects(world: World) -> None:
    async with AsyncExitStack() as stack:
        call = await world.call("ends", stack)
        reading = asyncio.create_task(items(call))
        await world.engines.close()
        with pytest.raises(EngineDownError, match="e: "):
            await asyncio.wait_for(reading, WAIT_S)
    assert not world.served.requests
