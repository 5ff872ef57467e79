"""Engines and routing state of one model in a router, and the wait of a request for a slot."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass

from actors.engine_pool.engines import EnginePool, Slot
from actors.errors import DeadlineError, UnavailableError
from actors.router.routing_feedback import RoutingFeedback
from actors.telemetry.router_metrics import RouterMetrics


@dataclass(frozen=True)
class Fleet:
    """Engines and routing state of one model, shared by all its requests."""

    prefill: EnginePool
    decode: EnginePool
    metrics: RouterMetrics
    feedback: RoutingFeedback


async def choose(
    role: str,
    engines: EnginePool,
    timeout_s: float,
    avoid: AbstractSet[str] = frozenset(),
    prefer: Sequence[str] = (),
    sequences: int = 1,
    queues: bool = False,
    part: bool = False,
    identity: str | None = None,
) -> Slot:
    """Take slots for `sequences` on a replica of `role`.

    Prefers the first free replica of `prefer`, else the least busy; excludes `avoid` and, with
    `identity`, replicas of other identities. Waits `timeout_s`; with `queues`, waits longer while a
    replica runs that is not excluded, and the caller sets the deadline. A later prompt of a list
    (`part`) does not count in the queue.

    Raises DeadlineError if no slot is free in time, UnavailableError if no engine of the role runs
    (at once in a stopping router, which outlives no start of an engine), OverloadedError if the
    queue is full.
    """
    slot = engines.take_now(avoid, prefer, sequences, identity)
    if slot is None:
        if engines.leaving and not engines.has_engines():
            raise UnavailableError(f"this router is stopping and has no {role} engine; send the request again")
        try:
            async with _while_running(engines, avoid, identity, timeout_s) if queues else asyncio.timeout(timeout_s):
                slot = await engines.take(avoid, prefer, sequences, part, identity)
        except TimeoutError as error:
            if engines.has_engines():
                raise DeadlineError(f"waiting for a free {role} replica took longer than {timeout_s:g} s") from None
            raise UnavailableError(f"no {role} engine is running; one may still be starting, see /health") from error
    return slot


@asynccontextmanager
async def _while_running(
    engines: EnginePool, avoid: AbstractSet[str], identity: str | None, period_s: float
) -> AsyncGenerator[None, None]:
    """Raise TimeoutError in the block once no replica of `identity` outside `avoid` runs.

    Checks every `period_s` seconds.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as bound:

        def look() -> None:
            nonlocal timer
            if engines.has_engines(avoid, identity):
                timer = loop.call_later(period_s, look)
            else:
                bound.reschedule(loop.time())

        timer = loop.call_later(period_s, look)
        try:
            yield
        finally:
            timer.cancel()
