"""The router: sends both legs of a request to two engines at once and relays decode's answer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
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
from actors.router.prompt_lists.list_answer import ListAnswer
from actors.router.prompt_lists.split import parent_id, split
from actors.router.routing_feedback import RoutingFeedback
from actors.telemetry.recent_requests import RecentRequests
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings import MIN_ONGOING_SEQUENCES, RoleName, RouterLimits, changed_limits

logger = logging.getLogger(__name__)

DISCARD_S = 5.0
"""Timeout of a `discard` call to a prefill replica."""

SEQUENCES_PER_SLOT = 4
"""Default number of sequences that a router admits for each slot of the decode engines."""


AnyAnswer = Answer | ListAnswer


class Router:
    """Serves requests with the engines of both roles."""

    def __init__(self, limits: RouterLimits, prefill: EnginePool, decode: EnginePool) -> None:
        self.limits = self._built_limits = limits
        self.rejected_config: str | None = None
        """Error of the last `user_config`; None if it was applied."""
        self.metrics = RouterMetrics()
        self._roles: dict[RoleName, EnginePool] = {"prefill": prefill, "decode": decode}
        self._decode = decode
        self._feedback = RoutingFeedback(limits.routing, self.metrics, prefill.ongoing, decode.ongoing)
        self._fleet = Fleet(prefill, decode, self.metrics, self._feedback, self._discard)
        self._ongoing = self._sequences = 0
        self.recent = RecentRequests()

    def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Apply new deadlines, limits and routing to later requests; Serve's hook.

        Keys absent from `user_config` have the values of `args`. An error leaves the settings
        unchanged: Serve stops a replica whose hook raises.
        """
        try:
            limits = changed_limits(self._built_limits, user_config)
            self._feedback.reconfigure(limits.routing)
        except Exception as error:
            self.rejected_config = str(error)
            self.metrics.user_config_rejected.set(1)
            logger.error("router user_config rejected; the previous settings stay in effect: %s", error)
            return
        self.limits, self.rejected_config = limits, None
        self.metrics.user_config_rejected.set(0)

    @property
    def ongoing(self) -> int:
        """Number of admitted requests."""
        return self._ongoing

    @property
    def ongoing_sequences(self) -> int:
        """Number of sequences of the admitted requests."""
        return self._sequences

    @property
    def max_sequences(self) -> int:
        """Number of ongoing sequences at which the router admits no more requests."""
        if self.limits.max_ongoing_sequences is not None:
            return self.limits.max_ongoing_sequences
        return max(SEQUENCES_PER_SLOT * self._decode.slots, MIN_ONGOING_SEQUENCES)

    @contextmanager
    def admitted(self) -> Iterator[Callable[[int], None]]:
        """Count a request as admitted; raises OverloadedError at `max_sequences`.

        Yields a function that sets the request's number of sequences after the body has arrived;
        until then it is 1. So the last admitted request may exceed the limit.
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

    def max_requests_of_key(self, keys: int) -> int | None:
        """Return the limit of ongoing requests for each of `keys` API keys; None for no limit."""
        if self.limits.max_ongoing_requests_per_key is not None:
            return self.limits.max_ongoing_requests_per_key
        return None if keys == 1 else max(self.max_sequences // 2, 1)

    @asynccontextmanager
    async def answer(self, request: ClientRequest) -> AsyncGenerator[AnyAnswer, None]:
        """Serve `request`. Leaving the context cancels its running calls on both engines.

        Each prompt of a list is served on its own pair of engines, if a pair can serve it. Raises
        OverloadedError, UnavailableError or DeadlineError when decode does not answer.
        """
        prompts = split(request)
        if not prompts:
            async with self._answer(request) as one:
                yield one
            return
        several = ListAnswer(prompts, parent_id(request), self._answer, max(self._decode.slots, 1))
        try:
            await several.open()
            yield several
        finally:
            await several.close()

    @asynccontextmanager
    async def _answer(self, request: ClientRequest) -> AsyncGenerator[Answer, None]:
        """Serve `request` on one pair of engines."""
        attempts = Dispatcher(
            request, self.limits, RequestTimer(self._timeout_s(request), request.arrived_at), self._fleet
        )
        answer = Answer(attempts, await attempts.open(), self.metrics)
        try:
            yield answer
        finally:
            await answer.close()

    def _timeout_s(self, request: ClientRequest) -> float:
        """Return the timeout for the first token of a stream, or for a whole answer."""
        return self.limits.first_token_timeout_s if request.streams else self.limits.request_timeout_s

    @property
    def slots_taken(self) -> dict[RoleName, int]:
        """Number of slots of this router on engines, by role."""
        return {role: engines.slots_taken for role, engines in self._roles.items()}

    async def close(self) -> None:
        """Close the connections to the engines."""
        await asyncio.gather(*(engines.close() for engines in self._roles.values()))

    @asynccontextmanager
    async def ask_decode(self, call: Call) -> AsyncGenerator[tuple[ResponseStart, AsyncIterator[bytes]], None]:
        """Send `call` to a decode replica; yield the start and the body of its answer.

        Tries the remaining replicas if one fails or answers 404: only one engine holds a stored
        response. Leaving the context cancels the call.
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
        """Return the number of replicas of each role that accept calls, from Serve's replica list.

        Calls no replica; Serve's controller checks their health.
        """
        return {role: len(engines.ongoing() or ()) for role, engines in self._roles.items()}

    @property
    def ready(self) -> bool:
        """True if a decode replica runs; decode alone can serve requests without prefill."""
        return self.replicas()["decode"] > 0

    async def engine_metrics(self) -> list[tuple[RoleName, str, str]]:
        """Return (role, replica id, exposition) of each replica that replies in
        `metrics_timeout_s`."""
        answers = await asyncio.gather(
            *(role.ask_all("metrics", self.limits.metrics_timeout_s) for role in self._roles.values())
        )
        pairs = zip(self._roles, answers, strict=True)
        return [(role, replica, text) for role, replies in pairs for replica, text in replies]

    async def engine_status(self) -> list[dict[str, Any]]:
        """Return the status of each engine replica that replies in `metrics_timeout_s`."""
        answers = await asyncio.gather(
            *(role.ask_all("status", self.limits.metrics_timeout_s) for role in self._roles.values())
        )
        return [status for replies in answers for status in replies]

    async def _discard(self, slot: Slot, transfer_id: str) -> None:
        """Ask the prefill replica of `slot` to free the KV of a transfer.

        If the call fails, the replica frees the KV when the lease expires.
        """
        self.metrics.discards.inc()
        async with deadline(DISCARD_S, f"discarding transfer {transfer_id}"):
            await self._roles["prefill"].ask(slot, "discard", transfer_id)
