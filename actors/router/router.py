"""The router: sends both legs of a request to a pair of engines at once and relays decode's answer."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from actors.broadcast import ask_all
from actors.engine_pool.engines import EnginePool
from actors.errors import OverloadedError
from actors.request import Call, Headers, ResponseStart
from actors.router.answer import Answer
from actors.router.client_request import ClientRequest, RequestTimer
from actors.router.dispatch import Dispatcher, Fleet
from actors.router.leg import Leg, choose, deadline
from actors.router.routing_feedback import RoutingFeedback
from actors.telemetry.recent_requests import RecentRequests
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings import MIN_ONGOING_SEQUENCES, RoleName, RouterLimits

SEQUENCES_PER_SLOT = 4
"""Sequences that a router admits for each slot of the decode engines, unless the settings have a
limit."""


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
        self._ongoing = self._sequences = 0
        self.recent = RecentRequests()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply new deadlines, limits and routing to later requests; Serve's hook."""
        self.limits = RouterLimits.model_validate(user_config)
        self._feedback.reconfigure(self.limits.routing)

    @property
    def ongoing(self) -> int:
        """Number of requests being served."""
        return self._ongoing

    @property
    def ongoing_sequences(self) -> int:
        """Number of sequences of the requests being served."""
        return self._sequences

    @property
    def max_sequences(self) -> int:
        """Largest number of sequences of the requests being served."""
        if self.limits.max_ongoing_sequences is not None:
            return self.limits.max_ongoing_sequences
        return max(SEQUENCES_PER_SLOT * self._decode.slots, MIN_ONGOING_SEQUENCES)

    @contextmanager
    def admitted(self) -> Iterator[Callable[[int], None]]:
        """Count a request while it is served; raises OverloadedError when `max_sequences` are being
        served.

        It counts as one sequence until the function returned is called with their number, which is
        known when the body has arrived. So the last request admitted may exceed the limit.
        """
        if self._sequences >= self.max_sequences:
            raise OverloadedError(
                f"this router is serving {self._sequences} sequences, which is its limit; retry later"
            )
        counted = 1

        def count(sequences: int) -> None:
            nonlocal counted
            self._sequences += sequences - counted
            counted = sequences

        self._ongoing += 1
        self._sequences += 1
        try:
            with self.metrics.ongoing.track_inprogress():
                yield count
        finally:
            self._ongoing -= 1
            self._sequences -= counted

    @asynccontextmanager
    async def answer(self, request: ClientRequest) -> AsyncGenerator[Answer, None]:
        """Serve `request`. Leaving the context ends the calls that still run on either engine.

        Raises OverloadedError, UnavailableError or DeadlineError when decode does not answer.
        """
        attempts = Dispatcher(
            request, self.limits, RequestTimer(self._timeout_s(request), request.arrived_at), self._fleet
        )
        answer = Answer(attempts, await attempts.open(), self.metrics)
        try:
            yield answer
        finally:
            await answer.close()

    def _timeout_s(self, request: ClientRequest) -> float:
        """Return the time to the first token of a stream, or to the whole of another answer."""
        return self.limits.first_token_timeout_s if request.streams else self.limits.request_timeout_s

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
            *(self._ask_all(role, "ping", self.limits.health_timeout_s) for role in self._roles)
        )
        return {role: len(replies) for role, replies in zip(self._roles, answers, strict=True)}

    async def engine_metrics(self) -> list[tuple[RoleName, str, str]]:
        """Return (role, replica, exposition) of each replica that answers within
        `metrics_timeout_s`."""
        answers = await asyncio.gather(
            *(self._ask_all(role, "metrics", self.limits.metrics_timeout_s) for role in self._roles)
        )
        pairs = zip(self._roles, answers, strict=True)
        return [(role, replica, text) for role, replies in pairs for replica, text in replies]

    async def engine_status(self) -> list[dict[str, Any]]:
        """Return the status of each engine replica that answers within `metrics_timeout_s`."""
        answers = await asyncio.gather(
            *(self._ask_all(role, "status", self.limits.metrics_timeout_s) for role in self._roles)
        )
        return [status for replies in answers for status in replies]

    async def _discard(self, transfer_id: str) -> None:
        """Ask the prefill replica that holds this transfer to free its KV; if that fails, the KV's
        lease expires."""
        self.metrics.discards.inc()
        await self._ask_all("prefill", "discard", self.limits.health_timeout_s, transfer_id)

    async def _ask_all(self, role: RoleName, method: str, timeout_s: float, *arguments: object) -> list[Any]:
        """Return the results of `method` on the replicas of `role`, without those that fail or are
        late."""
        return await ask_all(role, self._roles[role], method, timeout_s, *arguments)
