"""Router of the requests of one model, with its own engines, slots, routing state and metrics."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from actors.engine_pool.engine_call import EngineCall
from actors.engine_pool.engines import EnginePool
from actors.errors import BusyError, DeadlineError, RefusedError, UnavailableError
from actors.request import Call, ResponseStart, StreamChunk
from actors.router.answer import Answer
from actors.router.client_request import ClientRequest, RequestTimer
from actors.router.dispatch.dispatcher import Dispatcher
from actors.router.dispatch.fleet import Fleet, choose
from actors.router.prompt_lists import ListAnswer, parent_id, split
from actors.router.relay import StreamClock
from actors.telemetry.recent_requests import RecentRequest
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings.base import RoleName
from configs.settings.router import RouterLimits
from connectors.errors import TandemError

AnyAnswer = Answer | ListAnswer


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
    """Router of the requests of one model."""

    def __init__(
        self,
        engines: ModelEngines,
        limits: Callable[[], RouterLimits],
        metrics: RouterMetrics,
        recent: deque[RecentRequest],
        clock: StreamClock,
    ) -> None:
        """Create the router; `limits` returns the current limits of the service."""
        self.names = engines.names
        self.allows_adapters = engines.allows_adapters
        self.adapters = engines.adapters
        self.suffix = engines.suffix
        self.metrics = metrics
        self.recent = recent
        self.pools: dict[RoleName, EnginePool] = {"prefill": engines.prefill, "decode": engines.decode}
        self.fleet = Fleet(limits().routing, metrics, engines.prefill, engines.decode)
        self._decode = engines.decode
        self._limits = limits
        self._clock = clock

    @property
    def limits(self) -> RouterLimits:
        """Deadlines and limits for later requests."""
        return self._limits()

    async def open(self, request: ClientRequest) -> AnyAnswer:
        """Serve `request`; return its answer, which has started. Always `close` it.

        Each prompt of a list is served as a request of its own if `split` allows it. Raises the
        errors of `Dispatcher.open`.
        """
        prompts = split(request, self.limits.max_body_bytes)
        if not prompts:
            return await self._open(request)
        several = ListAnswer(prompts, parent_id(request), self._open, max(self._decode.slots, 1))
        await several.open()
        return several

    async def _open(self, request: ClientRequest) -> Answer:
        """Serve `request` without a split; `Dispatcher` chooses its engines."""
        timer = RequestTimer(self._timeout_s(request), request.arrived_at)
        attempts = Dispatcher(request, self.limits, timer, self.fleet)
        return Answer(attempts, await attempts.open(), self.metrics, self._clock)

    def _timeout_s(self, request: ClientRequest) -> float:
        """Return the timeout in seconds for the first token of a stream, or for a whole answer."""
        return self.limits.first_token_timeout_s if request.streams else self.limits.request_timeout_s

    @asynccontextmanager
    async def ask_decode(self, call: Call) -> AsyncGenerator[tuple[ResponseStart, AsyncIterator[bytes]], None]:
        """Send `call` to a decode replica; yield the start and the body of its answer.

        Tries the remaining replicas if one fails or answers 404: only one engine holds a stored
        response. Asks full replicas again, after the others. Leaving the context cancels the call.

        Raises BusyError if no replica has a free slot within `replica_timeout_s`, OverloadedError
        if the queue is full, EngineError for an internal error of an engine, UnavailableError if no
        replica runs. If a replica has failed and each other one has failed or answered 404, raises
        the last failure: UnavailableError or DeadlineError.
        """
        what, loop = f"{call.method} {call.path}", asyncio.get_running_loop()
        asked: set[str] = set()
        failed: TandemError | None = None
        full_since: float | None = None
        while True:
            async with AsyncExitStack() as stack:
                waited_s = 0.0 if full_since is None else loop.time() - full_since
                try:
                    slot = await choose("decode", self._decode, self.limits.replica_timeout_s - waited_s, asked)
                except DeadlineError:
                    raise BusyError(f"no decode engine that can answer {what} has a free slot; retry later") from None
                stack.callback(self._decode.give_back, slot)
                running = self._decode.dispatch(slot, call)
                stack.callback(running.cancel)
                start: ResponseStart | None = None
                try:
                    async with asyncio.timeout(self.limits.replica_timeout_s):
                        start = await running.start()
                except RefusedError:
                    full_since = loop.time() if full_since is None else full_since
                    continue  # the pool chooses the others first
                except TimeoutError:
                    failed = DeadlineError(f"{what} took longer than {self.limits.replica_timeout_s:g} s")
                except UnavailableError as error:
                    failed = error
                asked.add(slot.replica_id)
                others = (self._decode.ongoing() or {}).keys() - asked
                if start is not None and (start.status != HTTPStatus.NOT_FOUND or not (others or failed)):
                    yield start, self._body_of(running)
                    return
            if not others:
                assert failed is not None, "the last replica has answered or failed"
                raise failed

    async def _body_of(self, running: EngineCall) -> AsyncIterator[bytes]:
        until = asyncio.get_running_loop().time() + self.limits.request_timeout_s
        while (item := await running.next(self.limits.silence_timeout_s, until)) is not None:
            yield item.body if isinstance(item, StreamChunk) else item

    @property
    def slots(self) -> int:
        """Number of slots of the decode engines."""
        return self._decode.slots

    @property
    def slots_taken(self) -> dict[RoleName, int]:
        """Number of slots that this router holds on engines, by role."""
        return {role: engines.slots_taken for role, engines in self.pools.items()}

    def replicas(self) -> dict[RoleName, int]:
        """Return the number of replicas of each role that accept calls, from Serve's list."""
        return {role: engines.replica_count for role, engines in self.pools.items()}

    @property
    def ready(self) -> bool:
        """True if a decode replica accepts calls; decode can serve requests without prefill."""
        return self.replicas()["decode"] > 0

    async def ask_engines(self, method: str) -> list[tuple[RoleName, Any]]:
        """Return role and reply of each engine replica that replies in `metrics_timeout_s`."""
        answers = await asyncio.gather(
            *(pool.ask_all(method, self.limits.metrics_timeout_s) for pool in self.pools.values())
        )
        return [(role, reply) for role, replies in zip(self.pools, answers, strict=True) for reply in replies]

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
