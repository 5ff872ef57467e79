"""One leg of a request: a call to an engine, with its timeouts and timestamps."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, Protocol

from actors.engine_pool.engines import EnginePool, Slot
from actors.errors import DeadlineError, EngineDownError, SilentError, UnavailableError
from actors.request import EngineTimings, Heartbeat, ResponseStart, StreamChunk
from actors.telemetry.latency_breakdown import LegTimestamps
from connectors.errors import TandemError

ACCEPT_S = 5.0
"""Timeout of `Leg.accepted` in seconds; an engine normally replies within milliseconds."""


@asynccontextmanager
async def deadline(seconds: float, what: str) -> AsyncGenerator[None, None]:
    """Raise DeadlineError when the block takes longer than `seconds`.

    ``what``  name of the block in the error message
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise DeadlineError(f"{what} took longer than {seconds:g} s") from None


Response = tuple[ResponseStart, list[StreamChunk | bytes]]
"""Start of a response and its items: those of a stream so far, else the whole body."""


class Items(Protocol):
    """Items of a running call (`EngineCall` in `engine_pool/engines.py`)."""

    sent_at: float
    """Monotonic time just before the call is passed to its connection. A time after the send would
    make the leg appear shorter than it is."""

    @property
    def waits(self) -> bool:
        """True if reading may wait: the call runs and only heartbeats are queued."""

    async def next(self, until: float | None = None) -> Any: ...

    def cancel(self) -> None: ...


class Leg:
    """A call to an engine. Await `start` or `open`, then `next` until None; always `close`."""

    def __init__(self, role: str, response: Items) -> None:
        self.role = role
        self.heard_at = asyncio.get_running_loop().time()
        """Event loop's time at which the last item was read; at first, time of creation."""
        self.sampled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the engine has sampled the first token of an answer that is not streamed."""
        self._response = response
        self._answered_at: float | None = None
        self._timings: EngineTimings | None = None
        self._taken: bool | None = None
        """True if the engine has accepted the call, False if the call ended first; else None."""

    async def start(self, silence_s: float | None = None) -> ResponseStart:
        """Return the response's status and headers.

        Raises RefusedError if the engine refuses the call, UnavailableError if it ends the call
        without a response, and the errors of `next`.
        """
        await self.taken(silence_s)
        item = await self.next(silence_s)
        if not isinstance(item, ResponseStart):
            raise UnavailableError(f"the {self.role} engine ended a request without a response; try again")
        self._answered(item.timings)
        return item

    async def taken(self, silence_s: float | None = None) -> None:
        """Wait until the engine accepts the call, or ends it without an answer.

        Raises RefusedError if the engine refuses the call, and the errors of `next`.
        """
        if self._taken is None:
            try:
                self._taken = await self.next(silence_s) is not None
            except TandemError:
                self._taken = False
                raise

    async def open(self, silence_s: float | None = None, to_first_token: bool = False) -> Response:
        """Return the response with the first bytes of a stream, or with the whole body.

        Some streams start with events before the first token. With `to_first_token`, wait for the
        first chunk with a token, or for the end of the answer. Such a chunk proves that the engine
        has the KV of the prompt. Raises the errors of `start`.
        """
        return await self.rest(await self.start(silence_s), silence_s, to_first_token)

    async def rest(
        self, start: ResponseStart, silence_s: float | None = None, to_first_token: bool = False
    ) -> Response:
        """Return the same as `open`, for a response whose `start` has been read."""
        items: list[StreamChunk | bytes] = []
        while (item := await self.next(silence_s)) is not None:
            items.append(item)
            if start.streams and (isinstance(item, StreamChunk) or not to_first_token):
                break
        self._answered(items[-1].timings if items and isinstance(items[-1], StreamChunk) else None)
        return start, items

    @property
    def timestamps(self) -> LegTimestamps:
        """Send time, answer time (now, if there is none yet) and the engine's timings, if any."""
        answered_at = time.monotonic() if self._answered_at is None else self._answered_at
        return LegTimestamps(self._response.sent_at, answered_at, self._timings)

    @property
    def waits(self) -> bool:
        """True if `next` may have to wait."""
        return self._response.waits

    def _answered(self, timings: EngineTimings | None) -> None:
        self._answered_at = time.monotonic()
        self._timings = timings or self._timings

    async def next(self, silence_s: float | None = None, until: float | None = None) -> Any:
        """Return the next item except heartbeats, or None at the end of the call.

        Raises UnavailableError if the engine has died or its connection is lost, SilentError if it
        sends nothing for `silence_s`, DeadlineError at time `until` of the event loop's clock. Also
        raises RefusedError, CannotResumeError or EngineError if the engine reports such an error.
        """
        loop = asyncio.get_running_loop()
        while True:
            silent_at = None if silence_s is None else loop.time() + silence_s
            ends_at = silent_at if until is None or (silent_at is not None and silent_at < until) else until
            try:
                item = await self._response.next(ends_at)
            except StopAsyncIteration:
                return None
            except TimeoutError:
                if ends_at == until:
                    raise DeadlineError(
                        f"the {self.role} engine sent no further data before the request's deadline; try again"
                    ) from None
                raise SilentError(f"the {self.role} engine sent nothing for {silence_s:g} s; try again") from None
            except EngineDownError as error:
                raise UnavailableError(f"the {self.role} engine is not available; try again") from error
            self.heard_at = loop.time()
            if not isinstance(item, Heartbeat):
                return item
            if item.tokens and not self.sampled.done():
                self.sampled.set_result(None)

    async def accepted(self) -> bool:
        """Return whether the engine has accepted the call; wait at most ACCEPT_S for its reply.

        No other task may read the leg meanwhile.
        """
        with suppress(TandemError):
            await self.taken(ACCEPT_S)
        return self._taken is True

    def close(self) -> None:
        """Cancel the call unless it has ended; the engine then aborts the request."""
        self._response.cancel()


async def choose(
    stack: AsyncExitStack,
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
    """Take slots for `sequences` on a replica of `role`; `stack` gives them back when it unwinds.

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
    stack.callback(engines.give_back, slot)
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
