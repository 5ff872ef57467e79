"""The engines and the routing state of one model in a router, and the wait for a slot."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from actors.engine_pool.engine_call import EngineCall
from actors.engine_pool.engines import EnginePool
from actors.engine_pool.slots import Slot, SlotRequest
from actors.errors import BusyError, DeadlineError, OverloadedError, RefusedError, UnavailableError
from actors.policy.admission import Returns
from actors.policy.choice import Asked, Decision
from actors.policy.planner import Planner
from actors.request import Call, ResponseStart, StreamChunk
from actors.router.client_request import ClientRequest
from actors.telemetry.router_metrics import RecentRequest, RouterMetrics
from configs.settings.base import RoleName
from configs.settings.router import RouterLimits
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

LEARN_DELAY_S = 0.01
"""Delay in seconds before measured costs update the policy.

Otherwise the update would delay the first token of the request from which the costs come.
"""


@dataclass(frozen=True)
class ModelEngines:
    """The engines of one model.

    ``names``            name and aliases; empty without the setting `models`: the only model then
                         serves all requests
    ``allows_adapters``  whether clients may load and unload adapters
    ``adapters``         names of the adapters that the engines load at their start
    ``suffix``           end of the names of its deployments; empty without the setting `models`
    """

    prefill: EnginePool
    decode: EnginePool
    names: tuple[str, ...] = ()
    allows_adapters: bool = False
    adapters: tuple[str, ...] = ()
    suffix: str = ""


class ModelRouter:
    """Engines and routing state of one model, shared by all its requests."""

    def __init__(
        self,
        engines: ModelEngines,
        limits: Callable[[], RouterLimits],
        metrics: RouterMetrics,
        recent: deque[RecentRequest],
    ) -> None:
        """Create the router; `limits` returns the current limits of the service."""
        self.names = engines.names
        self.allows_adapters = engines.allows_adapters
        self.adapters = engines.adapters
        self.suffix = engines.suffix
        self.prefill = engines.prefill
        self.decode = engines.decode
        self.pools: dict[RoleName, EnginePool] = {"prefill": engines.prefill, "decode": engines.decode}
        self.metrics = metrics
        self.recent = recent
        self.planner = Planner(
            limits().routing, lambda learn: asyncio.get_running_loop().call_later(LEARN_DELAY_S, learn)
        )
        """Routing policy; `Attempt` (`attempt.py`) reports each outcome to it."""
        self.prompt_returns = Returns()
        self._limits = limits

    @property
    def limits(self) -> RouterLimits:
        """Deadlines and limits for later requests."""
        return self._limits()

    def decide(
        self,
        request: ClientRequest,
        whole: str | None,
        failed_prefill: AbstractSet[str],
        failed_decode: AbstractSet[str],
    ) -> Decision:
        """Decide route and replicas of `request`, and count the decision.

        ``whole``           reason why decode must serve the whole request, or None
        ``failed_prefill``  prefill replicas that must not be chosen
        ``failed_decode``   decode replicas that must not be chosen
        """
        own = self.decode.engines()
        engines = {**self.prefill.engines(), **own}
        identities = {name: one.identity for name, one in engines.items()}
        differ = len(set(identities.values())) > 1
        prefill, decode = self.prefill.ongoing(), self.decode.ongoing()
        # Prefer an identity with free prefill slots; if none with decode is free, exclude none.
        full = self.prefill.full() if differ else set()
        if full and _identities(self.decode).isdisjoint(identities.get(name) for name in prefill.keys() - full):
            full = set()
        decision = self.planner.decide(
            request.prompt,
            prefill,
            decode,
            asyncio.get_running_loop().time(),
            Asked(whole, request.session, self.prefill.listed, bool(failed_prefill), identities if differ else {}),
            avoid=failed_prefill | failed_decode | full,
            stores={name: one.store for name, one in engines.items() if one.store is not None},
            kv_caches={name: one.kv_cache for name, one in own.items() if one.kv_cache is not None},
        )
        self.metrics.decisions.labels(decision.route, decision.reason).inc()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("decision %s", decision.explain())
        return decision

    @property
    def slots_taken(self) -> dict[RoleName, int]:
        """Number of slots that this router holds on engines, by role."""
        return {role: engines.taken for role, engines in self.pools.items()}

    def replicas(self) -> dict[RoleName, int]:
        """Return the number of replicas of each role that accept calls, from Serve's list."""
        return {role: engines.replica_count for role, engines in self.pools.items()}

    @property
    def ready(self) -> bool:
        """True if a decode replica accepts calls; decode can serve requests without prefill."""
        return self.replicas()["decode"] > 0

    @property
    def degraded(self) -> str | None:
        """Reason why no pair of engines can serve requests; None if one can."""
        for role, count in self.replicas().items():
            if not count:
                return f"no {role} engine accepts calls"
        if _identities(self.prefill).isdisjoint(_identities(self.decode)):
            return (
                "no prefill engine has the identity (model, dtypes, release, cache layout, secret) of a decode engine, "
                "so decode computes all prompts"
            )
        return None

    async def ask_engines(self, method: str) -> list[tuple[RoleName, Any]]:
        """Return role and reply of each engine replica that replies in `metrics_timeout_s`; log the
        others.
        """
        found = []
        for (role, replica), reply in (await self.tell_engines(method, self.limits.metrics_timeout_s)).items():
            if isinstance(reply, Exception):
                logger.warning("method %s of replica %s failed, so its result is omitted: %r", method, replica, reply)
            else:
                found.append((role, reply))
        return found

    async def tell_engines(self, method: str, timeout_s: float, *arguments: object) -> dict[tuple[RoleName, str], Any]:
        """Call a method of all replicas; return each result or exception by role and replica."""
        answers = await asyncio.gather(*(pool.tell_all(method, timeout_s, *arguments) for pool in self.pools.values()))
        pairs = zip(self.pools, answers, strict=True)
        return {(role, replica): reply for role, replies in pairs for replica, reply in replies.items()}

    def leave(self) -> None:
        """Keep the engines running until this stopping router closes its connections."""
        for engines in self.pools.values():
            engines.leave()

    async def close(self) -> None:
        """Close the connections to the engines."""
        await asyncio.gather(*(engines.close() for engines in self.pools.values()))


@asynccontextmanager
async def ask_decode(
    models: Sequence[ModelRouter], call: Call
) -> AsyncGenerator[tuple[ResponseStart, AsyncIterator[bytes]], None]:
    """Send `call` to a decode replica of `models`; yield the start and the body of its answer.

    Tries the other replicas, model by model, if one fails or answers 404: only one engine holds a
    stored response. Asks full replicas again, after the others of their model. Yields the last 404
    if nothing has failed. Leaving the context cancels the call.

    Otherwise raises the last failure: BusyError if no replica of a model has a free slot within
    `replica_timeout_s`, OverloadedError if its queue is full, UnavailableError or DeadlineError.
    Raises EngineError at once for an internal error of an engine.
    """
    what, loop = f"{call.method} {call.path}", asyncio.get_running_loop()
    failed: TandemError | None = None
    for model in models:
        pool, timeout_s = model.decode, model.limits.replica_timeout_s
        asked: set[str] = set()
        full_since: float | None = None
        others = True
        while others:
            async with AsyncExitStack() as stack:
                waited_s = 0.0 if full_since is None else loop.time() - full_since
                try:
                    slot = await take_slot(pool, timeout_s - waited_s, SlotRequest(asked))
                except (DeadlineError, UnavailableError, OverloadedError) as error:
                    busy = BusyError(f"no decode engine that can answer {what} has a free slot; retry later")
                    failed = busy if isinstance(error, DeadlineError) else error
                    break
                stack.callback(pool.give_back, slot)
                running = pool.dispatch(slot, call)
                stack.callback(running.cancel)
                start: ResponseStart | None = None
                try:
                    async with asyncio.timeout(timeout_s):
                        start = await running.start()
                except RefusedError:
                    full_since = loop.time() if full_since is None else full_since
                    continue  # the pool chooses the others first
                except TimeoutError:
                    failed = DeadlineError(f"{what} took longer than {timeout_s:g} s")
                except UnavailableError as error:
                    failed = error
                asked.add(slot.replica_id)
                others = bool(pool.ongoing().keys() - asked)
                last = not others and model is models[-1] and failed is None
                if start is not None and (last or start.status != HTTPStatus.NOT_FOUND):
                    yield start, _body_of(running, model.limits)
                    return
    assert failed is not None, "the last replica has answered or failed"
    raise failed


async def _body_of(running: EngineCall, limits: RouterLimits) -> AsyncIterator[bytes]:
    until = asyncio.get_running_loop().time() + limits.request_timeout_s
    while (item := await running.next(limits.silence_timeout_s, until)) is not None:
        yield item.body if isinstance(item, StreamChunk) else item


async def take_slot(engines: EnginePool, timeout_s: float, wanted: SlotRequest, queues: bool = False) -> Slot:
    """Take slots on a replica of `engines`.

    Waits `timeout_s`; with `queues`, waits longer while a replica runs that the request may use,
    and the caller sets the deadline.

    Raises DeadlineError if no slot is free in time, UnavailableError if no engine of the role runs
    (at once in a stopping router, which outlives no start of an engine), OverloadedError if the
    queue is full.
    """
    slot, role = engines.take_now(wanted), engines.role
    if slot is None:
        if engines.stopping and not engines.has_engines():
            raise UnavailableError(f"this router is stopping and has no {role} engine; send the request again")
        try:
            async with _while_running(engines, wanted, timeout_s) if queues else asyncio.timeout(timeout_s):
                slot = await engines.take(wanted)
        except TimeoutError as error:
            if engines.has_engines():
                raise DeadlineError(f"waiting for a free {role} replica took longer than {timeout_s:g} s") from None
            raise UnavailableError(f"no {role} engine is running; one may still be starting, see /health") from error
    return slot


@asynccontextmanager
async def _while_running(engines: EnginePool, wanted: SlotRequest, period_s: float) -> AsyncGenerator[None, None]:
    """Raise TimeoutError in the block once no replica runs that may be taken.

    Checks every `period_s` seconds.
    """
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as bound:

        def look() -> None:
            nonlocal timer
            if engines.has_engines(wanted.avoid, wanted.identity):
                timer = loop.call_later(period_s, look)
            else:
                bound.reschedule(loop.time())

        timer = loop.call_later(period_s, look)
        try:
            yield
        finally:
            timer.cancel()


def _identities(pool: EnginePool) -> set[str]:
    """Return the identities of the engines that accept calls."""
    return {one.identity for one in pool.accepting().values()}
