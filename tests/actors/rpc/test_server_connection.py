"""Who comes to a server: strangers, and routers that say what no router would, or at an odd moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.request import Accepted, Call, Heartbeat
from actors.rpc import server_connection
from actors.rpc.messages import HEAD, RpcCancel, RpcFailure, RpcHello, RpcRequest, pack
from tests.actors.rpc.world import CALL, ITEMS, Stranger, World, joined


@pytest.mark.parametrize(
    "said",
    [
        pack(RpcHello("wrong")),
        pack(RpcHello("")),
        pack(RpcHello("w\udcff".encode("utf-8", "surrogatepass").decode("latin-1"))),
        pack(RpcRequest(CALL, "router", 0)),
        pack(RpcCancel(1)),
        pack(Heartbeat()),
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
        assert heard is None or (isinstance(heard, RpcFailure) and heard.kind == "stranger")
        assert await stranger.heard() is None
    assert not world.served.requests
    await asyncio.sleep(0.01)
    assert not world.server.snapshot().connections


async def test_who_says_nothing_is_let_go(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port scanner, or a router that died at once. A router that has said hello may be silent."""
    monkeypatch.setattr(server_connection, "HELLO_S", 0.2)
    async with Stranger(world) as router, Stranger(world) as silent:
        router.say(RpcHello(world.address.key))
        assert await silent.heard() == RpcFailure("stranger", "it did not authenticate in time")
        assert await silent.heard() is None
        router.say(RpcRequest(CALL, "router", 0))
        assert joined(await router.answer()) == joined(ITEMS)


@pytest.mark.parametrize(
    "said",
    [RpcHello("again"), RpcRequest(CALL, "router", 0), Heartbeat(), RpcFailure("full", "no")],
    ids=["hello", "request", "item", "failure"],
)
async def test_who_says_what_no_router_would(world: World, said: Any) -> None:
    """In the middle of a call: it is let go, and its call ends."""
    async with Stranger(world) as stranger:
        stranger.say(RpcHello(world.address.key), RpcRequest(Call("POST", "hangs"), "router", 0))
        assert isinstance(await stranger.heard(), Accepted)
        stranger.say(said)
        while await stranger.heard() is not None:
            pass
    await world.at_rest()


async def test_a_cancel_that_crosses_the_end(world: World) -> None:
    """Is of a call that is over, and not of the next."""
    async with Stranger(world) as router:
        router.say(RpcHello(world.address.key), RpcRequest(CALL, "router", 0))
        await router.answer()
        router.say(RpcCancel(1), RpcRequest(Call("POST", "waits"), "router", 0), RpcCancel(1))
        for _ in ITEMS:
            await router.heard()
        await asyncio.sleep(0.05)
        assert world.served.running == 1
        router.say(RpcCancel(2))
        await router.answer()
    await world.at_rest()


async def test_a_call_that_is_cancelled_before_it_has_begun(world: World) -> None:
    """Both in one read: it has an end, as every call has."""
    async with Stranger(world) as router:
        router.say(RpcHello(world.address.key), RpcRequest(CALL, "router", 0), RpcCancel(1))
        assert await router.answer() == []
        router.say(RpcRequest(CALL, "router", 0))
        assert joined(await router.answer()) == joined(ITEMS)
    assert len(world.served.requests) == 1
