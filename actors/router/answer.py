"""Answer to a client request. If the engine of a stream fails, another may continue it.

A stream passes to the client without waking a task: the callback that receives a frame from an
engine writes to the client's connection. The request's task sleeps until the stream ends, fails or
exceeds a time limit.
"""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Protocol

from actors.errors import CannotResumeError, DeadlineError, HandoverError, MovedError, SilentError, UnavailableError
from actors.request import FirstTokenChunk, ResponseStart, StreamChunk
from actors.router.attempt import Attempt
from actors.router.client_request import ClientRequest, why_not_resumable
from actors.router.dispatcher import Dispatcher
from actors.router.model_router import ModelRouter
from actors.router.splice import Splice
from actors.telemetry.latency_breakdown import LatencyBreakdown, break_down
from actors.telemetry.router_metrics import Pair
from configs.settings.base import RoleName

logger = logging.getLogger(__name__)

TICK_S = 1.0
"""Interval in seconds between checks of a stream's time limits."""

USAGE = b'"usage":'
COMPLETION_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')
"""Matches no text of a JSON string, where quotes are escaped."""

MOST_BYTES = 2**16
"""Size in bytes of joined events that are written at once."""


class ClientWriter(Protocol):
    """Connection of a client during a streamed answer."""

    on_resume: Callable[[], None] | None
    """Called when `paused` becomes false."""

    @property
    def paused(self) -> bool:
        """True while the client reads too slowly."""

    def write(self, data: bytes) -> None:
        """Send a part of the answer's body, or nothing after a disconnect. Check `paused` first."""


class Answer:
    """Answer to one request. Await `begin`, then `relay` if it is a stream; always `close`."""

    def __init__(self, dispatcher: Dispatcher, attempt: Attempt) -> None:
        self.sent_bytes = 0
        """Number of bytes that `relay` has sent."""
        self.usage = b""
        """Last events with a field `usage` that `relay` has sent, for the access log."""
        self._dispatcher = dispatcher
        self._attempt = self._first = attempt
        """The attempt that produced the first bytes; another attempt may continue the stream."""
        self.first_byte_s = dispatcher.age_s
        request = dispatcher.request
        self._resumable = why_not_resumable(request.endpoint, request.body) is None
        self._splice = Splice(self._resumable, dispatcher.model.metrics)
        self._items: deque[StreamChunk | bytes] = deque(attempt.items)
        """Items of the attempt that were read and not passed on."""
        self._whole_tokens = 0
        """Output tokens in the usage of an answer that is not streamed; 0: unknown."""
        self._complete = False
        """Whether the attempt has sent the whole answer."""
        self._writer: ClientWriter
        self._over: asyncio.Future[None]
        """Done when the running call has nothing more to pass on."""
        self._last = b""
        """Last events of the answer, which are not written: one write sends them and the end."""
        self._timer: asyncio.TimerHandle
        self._progressed = False
        """Whether an item has come since the last check."""
        self._heard_at = self._ends_at = 0.0
        self._paused_at: float | None = None

    @classmethod
    async def open(cls, model: ModelRouter, request: ClientRequest) -> "Answer":
        """Serve `request`; return its answer, which has started. Raises as `Dispatcher.open`."""
        dispatcher = Dispatcher(request, model)
        return cls(dispatcher, await dispatcher.open())

    @property
    def start(self) -> ResponseStart:
        """Status and headers; final after `begin`."""
        return self._first.start

    @property
    def local_reason(self) -> str | None:
        """Reason if decode alone serves the request, else None; final after `begin`."""
        return self._first.local_reason

    @property
    def sampled_by(self) -> RoleName | None:
        """Role of the engine that sampled the first token; None with `first_token: decode`."""
        return None if self._dispatcher.limits.first_token == "decode" else self._first.sampled_by

    @property
    def route(self) -> str:
        """Route of the attempt with the first bytes: `remote`, or `local` for decode alone."""
        return "remote" if self.local_reason is None else "local"

    @property
    def explanation(self) -> str | None:
        """`Attempt.explain` of the attempt that sent the first bytes, if the client asked."""
        return self._first.explain() if self._dispatcher.request.explain else None

    @property
    def pair(self) -> Pair:
        return self._first.pair

    @property
    def prompt_tokens(self) -> int | None:
        return self._first.prompt_tokens

    @property
    def completion_tokens(self) -> int | None:
        """Number of tokens so far of a stream that can be resumed; None for other answers."""
        return self._splice.tokens if self.start.streams and self._resumable else None

    @cached_property
    def breakdown(self) -> LatencyBreakdown:
        """Latency breakdown up to the first bytes, with the timings known at the first access."""
        dispatcher = self._dispatcher
        return break_down(self._first.timestamps(dispatcher.request, dispatcher.began_at))

    @property
    def accounted(self) -> bool:
        """True once the prefill engine's timings have arrived or can no longer arrive."""
        return self._first.accounted.is_set()

    async def account(self, at_most_s: float) -> None:
        """Wait until `accounted` is true: prefill's timings may arrive after the first token."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._first.accounted.wait(), at_most_s)

    async def begin(self) -> bytes:
        """Return the first event of a stream, or the complete body of another answer.

        `start` and `local_reason` are final afterwards: if the engine fails before its first event,
        the answer of another engine, with its own status, replaces the stream. Raises the errors of
        `relay`.
        """
        dispatcher, limits = self._dispatcher, self._dispatcher.limits
        while self._attempt.start.streams:
            try:
                while True:
                    item = (
                        self._items.popleft()
                        if self._items
                        else await self._attempt.call.next(limits.silence_timeout_s, dispatcher.ends_at)
                    )
                    if item is None:
                        raise UnavailableError("the engine closed a stream before its end; try again")
                    if isinstance(item, FirstTokenChunk):
                        dispatcher.extend(limits.idle_timeout_s)
                    if events := self._splice.feed(item):
                        if self._splice.from_decode:
                            self._attempt.sampled_by = "decode"
                        return events
            except UnavailableError as error:
                await self._resume(error)
        self._complete = True
        body = b"".join(item.body if isinstance(item, StreamChunk) else item for item in self._items)
        if dispatcher.request.sequences == 1 and (found := COMPLETION_TOKENS.search(body, body.rfind(USAGE))):
            self._whole_tokens = int(found[1])
        return body

    async def relay(self, writer: ClientWriter) -> bytes:
        """Send the rest of a stream; other engines continue it after a failure.

        Returns the last events, which the caller sends with the end of the answer. At an error, the
        client has all data that came before.

        Raises DeadlineError `idle_timeout_s` after the last token, or if the client reads nothing
        for this time; CannotResumeError, UnavailableError or OverloadedError if the engine fails
        and no engine can continue the stream; EngineError for an internal error of the engine.
        """
        self._writer, splice = writer, self._splice
        while True:
            sent = splice.sent
            try:
                await self._pass_on()
                error = UnavailableError("the engine closed a stream before its end; try again")
            except UnavailableError as death:
                error = death
            if splice.done:
                self._complete = not splice.over
                return self._last
            if splice.sent > sent:
                self._dispatcher.reset_failures()
            await self._resume(error)

    async def _pass_on(self) -> None:
        """Pass on the items of the running call until it or the answer ends."""
        loop, writer, call = asyncio.get_running_loop(), self._writer, self._attempt.call
        self._over = loop.create_future()
        self._heard_at, self._paused_at, self._progressed = loop.time(), None, False
        self._ends_at = self._heard_at + self._dispatcher.limits.idle_timeout_s
        writer.on_resume = call.reader = self._pump
        self._timer = loop.call_later(TICK_S, self._tick)
        try:
            self._pump()
            await self._over
        finally:
            self._timer.cancel()
            writer.on_resume = call.reader = None

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TICK_S, self._tick)
        self.check(loop.time())

    def check(self, now: float) -> None:
        """End the stream if it exceeds a limit; `now` is the event loop's time."""
        call, limits = self._attempt.call, self._dispatcher.limits
        idle_s, silence_s = limits.idle_timeout_s, limits.silence_timeout_s
        if self._writer.paused:
            self._paused_at = self._paused_at or now
            if now - self._paused_at >= idle_s:
                self._end(DeadlineError(f"the client read nothing of the stream for {idle_s:g} s"))
        if self._writer.paused or call.heard:
            self._heard_at = now
        if self._writer.paused or self._progressed:
            self._ends_at = now + idle_s
        call.heard = self._progressed = False
        if now >= self._ends_at:
            self._end(DeadlineError(f"the engine sent no data of the stream for {idle_s:g} s; try again"))
        elif now - self._heard_at >= silence_s:
            self._end(SilentError(f"the engine sent nothing for {silence_s:g} s; try again"))

    def _pump(self) -> None:
        """Pass on the items that have arrived, as far as the client takes them."""
        if self._writer.paused or self._over.done():
            return
        self._paused_at = None
        items, call, splice, ready = self._items, self._attempt.call, self._splice, b""
        try:
            try:
                while not splice.done and (items or call.has_items):
                    item = items.popleft() if items else call.pop()
                    ready += splice.feed(item)
                    self._progressed = True
                    if len(ready) >= MOST_BYTES:
                        self._write(ready)
                        ready = b""
                        if self._writer.paused:
                            return
            finally:
                if splice.done:
                    self._last = ready
                elif ready:
                    self._write(ready)
        except Exception as error:  # raised here, it would close the connection of all streams
            self._end(error)
        if splice.done or call.over:
            self._end(None if splice.done else call.error)

    def _write(self, events: bytes) -> None:
        self.sent_bytes += len(events)
        if USAGE in events:
            self.usage = events
        self._writer.write(events)

    def _end(self, error: Exception | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def close(self) -> None:
        """Cancel the running calls of the request, except one that has sent the whole answer."""
        self._attempt.close(self._splice.tokens or self._whole_tokens, self._complete)

    async def _resume(self, error: UnavailableError) -> None:
        """Make another attempt at the request after `error`.

        If the client has received events, the new attempt first repeats them; otherwise its answer
        replaces the stream. After a token, the attempt must answer within `idle_timeout_s`. Raises
        CannotResumeError if the stream cannot be continued, `error` if no attempts are left, and
        the errors of `Dispatcher.open`.
        """
        dispatcher, splice, outcome = self._dispatcher, self._splice, "failed"
        try:
            identity = None
            splice.restart()
            if splice.sent:
                # The client may have taken as long to read the last tokens.
                dispatcher.extend(dispatcher.limits.idle_timeout_s)
                identity = _check_resumable(dispatcher.request, splice)
            splice.handed_over = None  # the next engine repeats the recorded tokens
            left, transfer = self._attempt, None
            if isinstance(error, MovedError):
                # The stopping engine holds the KV until its call ends.
                transfer = error.transfer if splice.sent else None
                dispatcher.decode_leaves()
            elif isinstance(error, HandoverError):
                logger.warning("trying to continue a stream with another attempt: %s", error)
            elif (alone := self._attempt.on_prefill) is not None:
                dispatcher.prefill_failed(alone, error)
            else:
                dispatcher.decode_failed(error)
            left.report_end(splice.tokens, interrupted=True)  # the wait for another engine is no decode step
            if not transfer:
                left.close()
            try:
                self._attempt = await dispatcher.open(splice.replay_log(), identity, transfer)
            finally:
                if transfer:
                    left.close()
            start = self._attempt.start
            if not splice.sent:
                self._first = self._attempt
                self.first_byte_s = dispatcher.age_s
            elif not start.streams:
                raise CannotResumeError(
                    f"the engine that should continue the stream answered HTTP {start.status}; send the request again"
                )
            self._items = deque(self._attempt.items)
            outcome = "moved" if isinstance(error, MovedError) else "resumed"
        except CannotResumeError:
            outcome = "refused"
            raise
        finally:
            dispatcher.model.metrics.resumed_streams.labels(outcome).inc()


def _check_resumable(request: ClientRequest, splice: Splice) -> str:
    """Return the identity of the engines that can continue the stream of a failed engine.

    Raises CannotResumeError if none can.
    """
    problem = None
    if reason := why_not_resumable(request.endpoint, request.body):
        problem = f", and a stream with {reason} cannot be continued on another engine"
    elif not splice.tokens:
        problem = " and sent no record of the stream's tokens"
    elif splice.source is None:
        problem = " and has not reported which model and adapter computed the stream's tokens"
    if problem is not None:
        raise CannotResumeError(f"the engine has failed{problem}; send the request again")
    assert splice.source is not None
    return splice.source.engine
