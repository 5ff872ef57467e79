"""Two routers and engines with too few places for both, over real doors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from actors.engine_pool import discovery
from actors.engine_pool.engines import Engines
from actors.errors import DeadlineError, OverloadedError
from actors.request import Accepted, ResponseStart
from actors.router.router import Router
from actors.rpc.messages import Order
from actors.rpc.server import Door, announced
from tests.actors.behaviours import JSON, LIMITS, request
from tests.actors.fleet import METADATA

PLACES = 4
PROMPT_S = 0.05


class Handle:
    """Of Serve's handle, what a router needs that nobody scales and whose broadcasts nobody answers."""

    def __init__(self, deployment_id: str) -> None:
        self.deployment_id = deployment_id
        self.broadcasts = 0

    def options(self) -> Handle:
        return self

    def broadcast(self, _: str, *__: object) -> Handle:
        self.broadcasts += 1
        return self

    async def results_async(self, **_: object) -> list[Any]:
        return []


@dataclass
class Service:
    """One engine of each role, decode with few places, and routers."""

    answers: asyncio.Event = field(default_factory=asyncio.Event)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    """Decode has had no place left."""
    prompts: int = 0
    """That prefill has begun to compute."""

    async def prefill(self, order: Order) -> AsyncGenerator[Any, None]:
        yield Accepted("prefill 0")
        self.prompts += 1
        await asyncio.sleep(PROMPT_S)
        yield ResponseStart(200, JSON)
        yield b"{}"
        await asyncio.sleep(order.hold_s)

    async def decode(self, _: Order) -> AsyncGenerator[Any, None]:
        yield Accepted("decode 0", self.doors["decode"].ongoing)
        if self.doors["decode"].ongoing == PLACES:
            self.full.set()
        await self.answers.wait()
        yield ResponseStart(200, JSON)
        yield b"{}"

    async def open(self, stack: AsyncExitStack) -> None:
        self.doors: Mapping[str, Door] = {"prefill": Door(self.prefill, 64), "decode": Door(self.decode, PLACES)}
        for role, door in self.doors.items():
            places = 64 if role == "prefill" else PLACES
            said = {f"{role} 0": {**announced(await door.open("127.0.0.1", 0), 100, **METADATA), "places": places}}
            stack.push_async_callback(door.close)
            discovery.keep_list(role, partial(dict, said))

    def router(self, stack: AsyncExitStack) -> tuple[Router, Handle]:
        handles: list[Any] = [Handle("prefill"), Handle("decode")]
        limits = LIMITS.model_copy(update={"replica_timeout_s": 3.0})
        router = Router(limits, *map(Engines, handles))
        stack.push_async_callback(router.close)
        return router, handles[0]


async def ask(router: Router) -> bytes:
    async with router.answer(request(stream=False)) as answer:
        return b"".join([some async for some in answer.body()])


async def test_a_full_engine_costs_no_prompts() -> None:
    """Requests of a router that wait for what the requests of another have do not keep prefill busy meanwhile."""
    async with AsyncExitStack() as stack:
        service = Service()
        await service.open(stack)
        (first, _), (second, handle) = service.router(stack), service.router(stack)
        running = [asyncio.create_task(ask(first)) for _ in range(PLACES)]
        await service.full.wait()
        before = service.prompts
        waiting = [asyncio.create_task(ask(second)) for _ in range(PLACES)]
        await asyncio.wait(waiting)
        for one in waiting:
            with pytest.raises((DeadlineError, OverloadedError)):
                one.result()
        assert service.prompts - before <= PLACES, "the first of each: nobody knew better"
        assert handle.broadcasts <= PLACES

        before = service.prompts
        waiting = [asyncio.create_task(ask(second)) for _ in range(2 * PLACES)]
        await asyncio.sleep(0.5)
        assert service.prompts == before
        service.answers.set()
        assert await asyncio.gather(*running, *waiting) == [b"{}"] * 3 * PLACES
        assert service.prompts - before <= 3 * PLACES
    assert (first.places_taken, second.places_taken) == ({"prefill": 0, "decode": 0},) * 2
