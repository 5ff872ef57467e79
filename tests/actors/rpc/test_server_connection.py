"""Clients of a server: unauthenticated clients, and routers with unexpected messages or timing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest

from actors.request import Accepted, Call, Heartbeat
from actors.rpc import server_connection
from actors.rpc.messages import (
    LENGTH,
    Ask,
    CancelStream,
    Credit,
    EndStream,
    Open,
    Reply,
    RpcHello,
    RpcRefused,
    RpcRequest,
    RpcWelcome,
    StreamItem,
    encode,
)
from tests.actors.rpc.world import ITEMS, Stranger, World, joined, until


def opened(stream: int, path: str = "ends") -> Open:
    return Open(stream, RpcRequest(Call("POST", path), "router", 0))


@pytest.mark.parametrize(
    "said",
    [
        encode([RpcHello(1, "wrong")]),
        encode([RpcHello(1, "")]),
        encode([RpcHello(1, "w\xc3\xbf")]),
        encode([opened(1)]),
        encode([CancelStream(1)]),
        encode([StreamItem(1, Heartbeat())]),
        LENGTH.pack(3) + b"\xc1\xc1\xc1",
        LENGTH.pack(2**31),
        b"POST /call HTTP/1.1\r\n\r\n",
        bytes(10**7),
    ],
)
async def test_a_peer_without_the_key_is_refused(world: World, said: bytes) -> None:
    """A peer whose first message is no RpcHello is refused as well.

    It receives the reason if it has not sent too much.
    """
    async with Stranger(world) as stranger:
        stranger.writer.write(said)
        heard = await stranger.heard()
        assert heard is None or isinstance(heard, RpcRefused)
        assert await stranger.heard() is None
    assert not world.served.requests
    await until(lambda: not world.server._connections)  # noqa: SLF001


async def test_an_unknown_version_is_refused_by_name(world: World) -> None:
    """A router two versions older is refused; a newer router gets the engine's newest version."""
    async with Stranger(world) as old, Stranger(world) as new:
        old.say(RpcHello(0, world.address.key))
        heard = await old.heard()
        assert isinstance(heard, RpcRefused)
        assert "version 0 is not supported: this engine supports 1 to 2" in heard.reason
        assert await old.heard() is None
        new.say(RpcHello(9, world.address.key))
        assert await new.heard() == RpcWelcome(2)


async def test_a_silent_peer_is_disconnected(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not authenticate is disconnected; an authenticated router may be silent."""
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(Stranger(world))
        router.say(RpcHello(1, world.address.key))
        assert await router.heard() == RpcWelcome(1)
        monkeypatch.setattr(server_connection, "HELLO_S", 0.2)
        silent = await stack.enter_async_context(Stranger(world))
        assert await silent.heard() == RpcRefused("it did not authenticate within 0.2 s")
        assert await silent.heard() is None
        router.say(opened(1))
        assert joined(await router.answer(1)) == joined(ITEMS)


@pytest.mark.parametrize(
    "said",
    [RpcHello(1, "again"), opened(1), Credit(1, 0), Credit(1, 2**40)],
    ids=["hello", "same stream", "no credit", "too much"],
)
async def test_a_router_that_breaks_the_protocol(world: World, said: Any) -> None:
    """The engine closes the connection in the middle of a call, and the call ends.

    `test_protocol.py` has each message in each state.
    """
    async with Stranger(world) as stranger:
        stranger.say(RpcHello(1, world.address.key), opened(1, "hangs"))
        assert await stranger.heard() == RpcWelcome(1)
        assert await stranger.heard() == StreamItem(1, Accepted("e", 1))
        stranger.say(said)
        while await stranger.heard() is not None:
            pass
    await world.at_rest()


async def test_a_cancel_that_crosses_the_end(world: World) -> None:
    """The cancel has no effect on the ended stream or on any other."""
    async with Stranger(world) as router:
        router.say(RpcHello(1, world.address.key), opened(1))
        await router.answer(1)
        router.say(CancelStream(1), Credit(1, 5), opened(2, "waits"), CancelStream(1))
        for _ in ITEMS:
            await router.heard()
        await asyncio.sleep(0.05)
        assert world.served.running == 1
        router.say(CancelStream(2))
        while not isinstance(heard := await router.heard(), EndStream):
            assert heard is not None
    await world.at_rest()


async def test_a_call_that_is_cancelled_before_it_begins(world: World) -> None:
    """One frame opens and cancels the call; the server still ends it."""
    async with Stranger(world) as router:
        router.say(RpcHello(1, world.address.key), opened(1), CancelStream(1))
        assert await router.answer(1) == []
        router.say(opened(2))
        assert joined(await router.answer(2)) == joined(ITEMS)
    assert len(world.served.requests) == 1


async def test_streams_of_one_connection(world: World) -> None:
    """One frame opens two streams; each has its own items. Methods need no slot."""
    async with Stranger(world) as router:
        router.say(RpcHello(1, world.address.key), Ask(1, "double", (21,)), Ask(2, "double", (2,)))
        assert [await router.heard() for _ in range(3)] == [RpcWelcome(1), Reply(1, 42), Reply(2, 4)]
        router.say(opened(3, "waits"), opened(4))
        assert joined(await router.answer(4)) == joined(ITEMS)
        world.served.go_on.set()
        await router.answer(3)
    await world.at_rest()
