"""Engines and routing state of one model in a router, and the wait of a request for a slot."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager

from actors.engine_pool.engines import EnginePool, Slot
from actors.errors import DeadlineError, UnavailableError
from actors.policy.decision import Decision
from actors.policy.planner import Planner
from actors.router.client_request import ClientRequest
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings.router import RoutingSettings

logger = logging.getLogger(__name__)

LEARN_DELAY_S = 0.01
"""Delay in seconds before measured costs update the policy.

Otherwise the update would delay the first token of the request from which the costs come.
"""


class Deferred:
    """Queue that runs its callables at once, LEARN_DELAY_S after the first, and logs their
    errors.
    """

    def __init__(self) -> None:
        self._given: list[Callable[[], None]] = []

    def __call__(self, do: Callable[[], None]) -> None:
        if not self._given:
            asyncio.get_running_loop().call_later(LEARN_DELAY_S, self._do_all)
        self._given.append(do)

    def _do_all(self) -> None:
        given, self._given = self._given, []
        for do in given:
            try:
                do()
            except Exception:
                logger.exception("cannot update the routing policy with a measured cost; ignoring the measurement")


class Fleet:
    """Engines and routing state of one model, shared by all its requests."""

    def __init__(
        self, settings: RoutingSettings, metrics: RouterMetrics, prefill: EnginePool, decode: EnginePool
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.metrics = metrics
        self.planner = Planner(settings, Deferred())
        """Routing policy; `Attempt` (`attempt.py`) reports each outcome to it."""

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
        identities = self.prefill.identities() | self.decode.identities()
        decision = self.planner.decide(
            request.prompt,
            self.prefill.ongoing(),
            self.decode.ongoing(),
            _now(),
            whole=whole,
            session=request.session,
            avoid=failed_prefill | failed_decode,
            prefill_failed=bool(failed_prefill),
            stores=self.prefill.stores() | self.decode.stores(),
            identities=identities if len(set(identities.values())) > 1 else {},
        )
        self.metrics.decisions.labels(decision.route, decision.reason).inc()
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("decision %s", decision.explain())
        return decision

    def failed(self, replica: str, silent: bool = False) -> None:
        """Report that a call to `replica` failed.

        ``silent``  whether the replica sent nothing for `silence_timeout_s`
        """
        self.planner.failed(replica, _now(), silent)


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


def _now() -> float:
    return asyncio.get_running_loop().time()
