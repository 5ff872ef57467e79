"""Two routers and engines with too few slots for both, over real RPC servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from actors.engine.asgi_call import Notices
from actors.engine.split_call import SplitCall
from actors.engine_pool import engines
from actors.engine_pool.engines import EnginePool
from actors.errors import DeadlineError, OverloadedError
from actors.request import Accepted, Call, ResponseStart
from actors.router.model_router import ModelEngines
from actors.router.router import Router
from actors.rpc import client, server_connection
from actors.rpc.messages import RpcRequest
from actors.rpc.server import RpcServer, replica_metadata
from actors.rpc.server_connection import ServedStream
from configs.settings.deployment import RoleSettings
from configs.settings.router import RouterLimits
from testing.answers import whole_body
from tests.actors.behaviours import JSON, LIMITS, request
from tests.actors.fleet import METADATA

SLOTS = 4
QUEUE = RoleSettings().max_queued_requests
SHORT = LIMITS.model_copy(update={"replica_timeout_s": 3.0, "request_timeout_s": 3.0})
PATIENT = LIMITS.model_copy(update={"prefill_wait_s": 60.0, "replica_timeout_s": 60.0})
"""Timeouts longer than a pause of the machine."""
PROMPT_S = 0.05


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine ends no connection attempt and no authentication."""
    monkeypatch.setattr(client, "CONNECT_S", 60.0)
    monkeypatch.setattr(server_connection, "HELLO_S", 60.0)


class Handle:
    """Part of Serve's handle that a router without autoscaling needs."""

    def __init__(self, deployment_id: str) -> None:
        self.deployment_id = deployment_id

    def options(self) -> Handle:
        return self


@dataclass
class Service:
    """One engine of each role, decode with few slots, and routers."""

    answers: asyncio.Event = field(default_factory=asyncio.Event)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when decode has no free slot."""
    prompt_s: float = PROMPT_S
    slots: int = SLOTS
    prompts: int = 0
    """Set when prefill has begun to compute."""

    async def prefill(self, order: RpcRequest, _: ServedStream) -> AsyncGenerator[Any, None]:
        yield Accepted("prefill 0")
        self.prompts += 1
        await asyncio.sleep(self.prompt_s)
        yield ResponseStart(200, JSON)
        yield b"{}"
        await asyncio.sleep(order.hold_s)

    def decode(self, request: RpcRequest, _: ServedStream) -> AsyncGenerator[Any, None]:
        assert request.prefill is not None
        split = SplitCall(request.call, request.prefill, self.channels, self.answer, lambda _: nullcontext())
        return split.items(Accepted("decode 0", self.servers["decode"].ongoing))

    async def answer(self, call: Call, notices: Notices, began_at: float) -> AsyncGenerator[Any, None]:
        if self.servers["decode"].ongoing == SLOTS:
            self.full.set()
        await self.answers.wait()
        yield ResponseStart(200, JSON)
        yield b"{}"

    async def open(self, stack: AsyncExitStack) -> None:
        self.channels = client.Channels()
        stack.callback(self.channels.close)
        self.servers: Mapping[str, RpcServer] = {
            "prefill": RpcServer(self.prefill, 64),
            "decode": RpcServer(self.decode, self.slots),
        }
        for role, server in self.servers.items():
            slots = 64 if role == "prefill" else self.slots
            said = {
                f"{role} 0": {**replica_metadata(await server.open("127.0.0.1", 0), QUEUE, **METADATA), "slots": slots}
            }
            stack.push_async_callback(server.close)
            engines.publish(role, said)

    def router(self, stack: AsyncExitStack, limits: RouterLimits) -> Router:
        handles: list[Any] = [Handle("prefill"), Handle("decode")]
        prefill, decode = handles
        router = Router(limits, ModelEngines(EnginePool("prefill", prefill), EnginePool("decode", decode)))
        stack.push_async_callback(router.close)
        return router


async def ask(router: Router) -> bytes:
    async with router.answer(request(stream=False)) as answer:
        return await whole_body(answer)


async def test_a_full_engine_costs_no_prompts() -> None:
    """Requests of one router that wait for slots used by the other do not occupy prefill
    meanwhile.
    """
    async with AsyncExitStack() as stack:
        service = Service()
        await service.open(stack)
        first, second = service.router(stack, PATIENT), service.router(stack, SHORT)
        running = [asyncio.create_task(ask(first)) for _ in range(SLOTS)]
        await service.full.wait()
        before = service.prompts
        waiting = [asyncio.create_task(ask(second)) for _ in range(SLOTS)]
        await asyncio.wait(waiting)
        for one in waiting:
            with pytest.raises((DeadlineError, OverloadedError)):
                one.result()
        assert service.prompts - before <= SLOTS, "each router's first request: it did not know the load"

        before = service.prompts
        second.limits = PATIENT
        waiting = [asyncio.create_task(ask(second)) for _ in range(2 * SLOTS)]
        await asyncio.sleep(0.5)
        assert service.prompts == before
        service.answers.set()
        assert await asyncio.gather(*running, *waiting) == [b"{}"] * 3 * SLOTS
        assert service.prompts - before <= 3 * SLOTS
    assert (first.slots_taken, second.slots_taken) == ({"prefill": 0, "decode": 0},) * 2


async def test_a_thousand_requests_at_once() -> None:
    """With the default limits no request is refused: all wait for the engines' slots."""
    async with AsyncExitStack() as stack:
        service = Service(prompt_s=0.001, slots=32)
        service.answers.set()
        await service.open(stack)
        router = service.router(stack, LIMITS)
        ends = await asyncio.gather(*(ask(router) for _ in range(1000)), return_exceptions=True)
        assert {str(end) for end in ends if isinstance(end, BaseException)} == set()
        assert router.slots_taken == {"prefill": 0, "decode": 0}


async def test_the_wait_for_a_busy_engine_is_part_of_the_time_to_the_first_token() -> None:
    """`replica_timeout_s` limits the wait for a running engine, not for a slot on a busy one."""
    async with AsyncExitStack() as stack:
        service = Service()
        await service.open(stack)
        router = service.router(stack, PATIENT)
        first = [asyncio.create_task(ask(router)) for _ in range(SLOTS)]
        await service.full.wait()
        router.limits = PATIENT.model_copy(update={"replica_timeout_s": 0.2})
        asking = [asyncio.create_task(ask(router)) for _ in range(SLOTS)]
        await asyncio.sleep(1.0)
        assert [one for one in first + asking if one.done()] == []
        service.answers.set()
        assert await asyncio.gather(*first, *asking) == [b"{}"] * 2 * SLOTS
