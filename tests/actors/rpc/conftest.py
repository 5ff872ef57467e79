"""Each test of a door, on both kinds of event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from actors.engine_pool import engines as module
from actors.engine_pool.discovery import Engine
from actors.engine_pool.engines import Engines
from actors.rpc.server import Door, announced
from tests.actors.rpc.world import Served, World


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
