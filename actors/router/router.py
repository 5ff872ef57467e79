"""The router: sends both legs of a request to a pair of engines at once and relays decode's answer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any

from actors.engine_pool.engines import EnginePool, Slot
from actors.errors import OverloadedError, UnavailableError
from actors.request import Call, ResponseStart, StreamChunk
from actors.router.answer import Answer
from actors.router.client_request import ClientRequest, RequestTimer
from actors.router.dispatch import Dispatcher, Fleet
from actors.router.leg import Leg, choose, deadline
from actors.router.routing_feedback import RoutingFeedback
from actors.telemetry.recent_requests import RecentRequests
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings import RoleName, RouterLimits, changed_limits

logger = logging.getLogger(__name__)

DISCARD_S = 5.0
"""Longest wait for prefill replicas to free the KV of a transfer that decode does not fetch."""


class Router:
    """Serves requests with the engines of both roles. `answer` opens a request; closing it ends
    both legs."""

    def __init__(self, limits: RouterLimits, prefill: EnginePool, decode: EnginePool) -> None:
        self.limits = self._built_limits = limits
        self.rejected_config: str | None = None
        """Why the last `user_config` was refused; None if it took effect."""
        self.metrics = RouterMetrics()
        self._roles: dict[RoleName, EnginePool] = {"prefill": prefill, "decode": decode}
        self._decode = decode
        self._feedback = RoutingFeedback(limits.routing, self.metrics, prefill.ongoing, decode.ongoing)
        self._fleet = Fleet(prefill, decode, self.metrics, self._feedback, self._discard)
        self._ongoing = 0
        self.recent = RecentRequests()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply new deadlines, limits and routing to later requests; Serve's hook.

        Keys that `user_config` does not name have the values of `args`. After an error the present
        settings stay: Serve would stop a replica whose hook raises.
        """
        try:
            limits = changed_limits(self._built_limits, user_config)
            self._feedback.reconfigure(limits.routing)
        except Exception as error:
            self.rejected_config = str(error)
            self.metrics.user_config_rejected.set(1)
            logger.error("the router's user_config is refused, its settings stay as they are: %s", error)
            return
        self.limits, self.rejected_config = limits, None
        self.metrics.user_config_rejected.set(0)

    @property
    def ongoing(self) -> int:
        """Number of requests being served."""
        return self._ongoing

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count a request while it is served; raises OverloadedError above `max_ongoing_requests`."""
        if self._ongoing >= self.limits.max_ongoing_requests:
            raise OverloadedError(f"this router is serving {self._ongoing} requests, which is its limit; retry later")
        self._ongoing += 1
        try:
            with self.metrics.ongoing.track_inprogress():
                yield
        finally:
            self._ongoing -= 1

    def max_requests_of_key(self, keys: int) -> int | None:
        """Return how many requests one of `keys` API keys may have here; None: the router's own limit
        is enough."""
        if self.limits.max_ongoing_requests_per_key is not None:
            return self.limits.max_ongoing_requests_per_key
        return None if keys == 1 else max(self.limits.max_ongoing_requests // 2, 1)

    @asynccontextmanager
    async def answer(self, request: ClientRequest) -> AsyncGenerator[Answer, None]:
        """Serve `request`. Leaving the context ends the calls that still run on either engine.

        Raises OverloadedError, UnavailableError or DeadlineError when decode does not answer.
        """
        attempts = Dispatcher(
            request, self.limits, RequestTimer(self.limits.request_timeout_s, request.arrived_at), self._fleet
        )
        answer = Answer(attempts, await attempts.open(), self.metrics)
        try:
            yield answer
        finally:
            await answer.close()

    @property
    def slots_taken(self) -> dict[RoleName, int]:
        """Number of slots that this router holds on engines of each role."""
        return {role: engines.slots_taken for role, engines in self._roles.items()}

    async def close(self) -> None:
        """Close the connections to the engines."""
        await asyncio.gather(*(engines.close() for engines in self._roles.values()))

    @asynccontextmanager
    async def ask_decode(self, call: Call) -> AsyncGenerator[tuple[ResponseStart, AsyncIterator[bytes]], None]:
        """Send a request that one decode replica answers alone; yield the start and the body of its
        answer. Leaving the context ends the call.

        A stored response is in one engine: when a replica answers 404 or fails, the others are asked.
        """
        asked: set[str] = set()
        failed: UnavailableError | None = None
        while True:
            async with AsyncExitStack() as stack:
                slot = await choose(stack, "decode", self._decode, self.limits.replica_timeout_s, asked)
                asked.add(slot.replica_id)
                others = (self._decode.ongoing() or {}).keys() - asked
                leg = Leg("decode", self._decode.dispatch(slot, call))
                stack.callback(leg.close)
                try:
                    async with deadline(self.limits.replica_timeout_s, f"{call.method} {call.path}"):
                        start = await leg.start()
                except UnavailableError as error:
                    failed = error
                    if others:
                        continue
                    raise
                if start.status == HTTPStatus.NOT_FOUND and others:
                    continue
                if start.status == HTTPStatus.NOT_FOUND and failed is not None:
                    raise failed
                yield start, self._body_of(leg)
                return

    async def _body_of(self, leg: Leg) -> AsyncIterator[bytes]:
        until = asyncio.get_running_loop().time() + self.limits.request_timeout_s
        while (item := await leg.next(self.limits.silence_timeout_s, until)) is not None:
            yield item.body if isinstance(item, StreamChunk) else item

    def replicas(self) -> dict[RoleName, int]:
        """Return how many replicas of each role accept calls, as Serve has published them.

        Serve's controller checks their health; nobody is asked here.
        """
        return {role: len(engines.ongoing() or ()) for role, engines in self._roles.items()}

    @property
    def ready(self) -> bool:
        """True while requests can be served: decode serves them alone if there is no prefill."""
        return self.replicas()["decode"] > 0

    async def engine_metrics(self) -> list[tuple[RoleName, str, str]]:
        """Return (role, replica, exposition) of each replica that answers within
        `metrics_timeout_s`."""
        answers = await asyncio.gather(
            *(role.ask_all("metrics", self.limits.metrics_timeout_s) for role in self._roles.values())
        )
        pairs = zip(self._roles, answers, strict=True)
        return [(role, replica, text) for role, replies in pairs for replica, text in replies]

    async def engine_status(self) -> list[dict[str, Any]]:
        """Return the status of each engine replica that answers within `metrics_timeout_s`."""
        answers = await asyncio.gather(
            *(role.ask_all("status", self.limits.metrics_timeout_s) for role in self._roles.values())
        )
        return [status for replies in answers for status in replies]

    async def _discard(self, slot: Slot, transfer_id: str) -> None:
        """Ask the prefill replica of `slot` to free the KV of a transfer; if that fails, the KV's
        lease expires."""
        self.metrics.discards.inc()
        async with deadline(DISCARD_S, f"discarding transfer {transfer_id}"):
            await self._roles["prefill"].ask(slot, "discard", transfer_id)
