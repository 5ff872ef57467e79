"""The router: sends both legs of a request to a pair of engines at once and relays decode's answer."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from actors.engine_pool.engines import EnginePool, Slot
from actors.errors import OverloadedError
from actors.request import Call, Headers, ResponseStart
from actors.router.answer import Answer
from actors.router.client_request import ClientRequest, RequestTimer
from actors.router.dispatch import Dispatcher, Fleet
from actors.router.leg import Leg, choose, deadline
from actors.router.routing_feedback import RoutingFeedback
from actors.telemetry.recent_requests import RecentRequests
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings import RoleName, RouterLimits


class Router:
    """Serves requests with the engines of both roles. `answer` opens a request; closing it ends
    both legs."""

    def __init__(self, limits: RouterLimits, prefill: EnginePool, decode: EnginePool) -> None:
        self.limits = limits
        self.metrics = RouterMetrics()
        self._roles: dict[RoleName, EnginePool] = {"prefill": prefill, "decode": decode}
        self._decode = decode
        self._feedback = RoutingFeedback(limits.routing, self.metrics, prefill.ongoing, decode.ongoing)
        self._fleet = Fleet(prefill, decode, self.metrics, self._feedback, self._discard)
        self._ongoing = 0
        self.recent = RecentRequests()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply new deadlines, limits and routing to later requests; Serve's hook."""
        self.limits = RouterLimits.model_validate(user_config)
        self._feedback.reconfigure(self.limits.routing)

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

    async def ask_decode(self, method: str, path: str, headers: Headers) -> tuple[ResponseStart, bytes]:
        """Send a request without a body to a decode replica, and return its answer."""
        async with AsyncExitStack() as stack, deadline(self.limits.replica_timeout_s, f"{method} {path}"):
            slot = await choose(stack, "decode", self._decode, self.limits.replica_timeout_s)
            leg = Leg("decode", self._decode.dispatch(slot, Call(method, path, headers)))
            stack.callback(leg.close)
            start, body = await leg.start(), b""
            while isinstance(item := await leg.next(), bytes):
                body += item
            return start, body

    async def healthy(self) -> dict[RoleName, int]:
        """Return how many replicas of each role answer within `health_timeout_s`."""
        answers = await asyncio.gather(
            *(role.ask_all("ping", self.limits.health_timeout_s) for role in self._roles.values())
        )
        return {role: len(replies) for role, replies in zip(self._roles, answers, strict=True)}

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
        async with deadline(self.limits.health_timeout_s, f"discarding transfer {transfer_id}"):
            await self._roles["prefill"].ask(slot, "discard", transfer_id)
