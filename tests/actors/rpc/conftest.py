"""Run each test of a server on both kinds of event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from actors.engine_pool import engines as module
from actors.engine_pool.engines import EnginePool
from actors.engine_pool.slots import EngineReplica
from actors.rpc import client, server, server_connection
from actors.rpc.server import RpcServer, replica_metadata
from tests.actors.rpc.world import WAIT_S, Served, WholeCall, World


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> Any:
    """Actors run on uvloop, whose transports accept other misuse."""
    return request.param()


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine ends no connection attempt, authentication or last answer."""
    monkeypatch.setattr(client, "CONNECT_S", WAIT_S)
    monkeypatch.setattr(server_connection, "HELLO_S", WAIT_S)
    monkeypatch.setattr(server, "HANDSHAKE_S", WAIT_S)
    monkeypatch.setattr(server, "CUT_OFF_S", WAIT_S)
    monkeypatch.setattr(server, "KEPT_WITHIN_S", 0)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[World, None]:
    served = Served()

    async def double(number: int) -> int:
        return 2 * number

    async def broken() -> object:
        return object()

    async def ping() -> str:
        return "e"

    async def sleep() -> None:
        await asyncio.sleep(60)

    listening = RpcServer(served, slots=2, methods={"broken": broken, "double": double, "ping": ping, "sleep": sleep})
    address = await listening.open("127.0.0.1", 0)
    known = {"e": EngineReplica(address, 9, 9, replica_metadata(address, 9), "e")}
    monkeypatch.setattr(module, "replicas_of", lambda _: known)
    monkeypatch.setattr(module, "EngineCall", WholeCall)
    handle: Any = SimpleNamespace(deployment_id="engines")
    handle.options = lambda: handle
    engines = EnginePool("decode", handle)
    yield World(served, listening, address, engines)
    await engines.close()
    await listening.close()
