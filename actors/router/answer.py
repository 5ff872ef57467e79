"""Answer to a client request. If the engine of a stream fails, another may continue it."""

import asyncio
import logging
from collections import deque
from contextlib import suppress
from functools import cached_property

from actors.errors import CannotResumeError, HandoverError, MovedError, UnavailableError
from actors.request import FirstTokenChunk, StreamChunk
from actors.router.client_request import ClientRequest, why_not_resumable
from actors.router.dispatch.attempt import Attempt
from actors.router.dispatch.dispatcher import Dispatcher
from actors.router.relay import ClientWriter, Relay, StreamClock
from actors.router.splice import Splice
from actors.telemetry.latency_breakdown import LatencyBreakdown, break_down
from actors.telemetry.recent_requests import Pair
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings.base import RoleName

logger = logging.getLogger(__name__)


class Answer:
    """Answer to one request. Await `begin`, then `relay` if it is a stream; always `close`."""

    def __init__(self, attempts: Dispatcher, attempt: Attempt, metrics: RouterMetrics, clock: StreamClock) -> None:
        self.start = attempt.start
        self.local_reason = attempt.local_reason
        self.first_byte_s = attempts.timing.age_s
        self.sent_bytes = 0
        """Number of bytes that `relay` has sent."""
        self.usage = b""
        """Last events with token counts that `relay` has sent."""
        self._attempts = attempts
        self._attempt = attempt
        self._first = attempt
        """The attempt that produced the first bytes; another attempt may continue the stream."""
        self._metrics = metrics
        self._clock = clock
        request = attempts.request
        self._resumable = why_not_resumable(request.endpoint, request.body) is None
        self._splice = Splice(self._resumable, metrics)
        self._items: deque[StreamChunk | bytes] = deque(attempt.items)
        """Items of the attempt that `begin` has not passed on."""
        self._complete = False
        """Whether the attempt has sent the whole answer."""

    @property
    def sampled_by(self) -> RoleName | None:
        """Role of the engine that sampled the first token; None with `first_token: decode`."""
        return None if self._attempts.limits.first_token == "decode" else self._first.sampled_by

    @property
    def route(self) -> str:
        """Route of the attempt with the first bytes: `remote`, or `local` for decode alone."""
        return "remote" if self.local_reason is None else "local"

    @property
    def explanation(self) -> str | None:
        """Routing decision and its estimates as JSON; None unless the client asked for them."""
        return self._first.decision.explain() if self._attempts.request.explain else None

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
        return break_down(self._attempts.timestamps(self._first))

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
        limits, timing = self._attempts.limits, self._attempts.timing
        while self._attempt.start.streams:
            try:
                while True:
                    item = (
                        self._items.popleft()
                        if self._items
                        else await self._attempt.call.next(limits.silence_timeout_s, timing.ends_at)
                    )
                    if item is None:
                        raise UnavailableError("the engine closed a stream before its end; try again")
                    if isinstance(item, FirstTokenChunk):
                        timing.extend(limits.idle_timeout_s)
                    if events := self._splice.feed(item):
                        if self._splice.from_decode:
                            self._attempt.sampled_by = "decode"
                        return events
            except UnavailableError as error:
                await self._resume(error)
        self._complete = True
        return b"".join(item.body if isinstance(item, StreamChunk) else item for item in self._items)

    async def relay(self, writer: ClientWriter) -> bytes:
        """Send the rest of a stream; other engines continue it after a failure.

        Returns the last events, which the caller sends with the end of the answer.

        Raises DeadlineError `idle_timeout_s` after the last token, or if the client reads nothing
        for this time; CannotResumeError, UnavailableError or OverloadedError if the engine fails
        and no engine can continue the stream; EngineError for an internal error of the engine.
        """
        limits, splice = self._attempts.limits, self._splice
        while True:
            sent = splice.sent
            relay = Relay(
                self._attempt.call,
                self._items,
                splice,
                writer,
                limits.silence_timeout_s,
                limits.idle_timeout_s,
            )
            try:
                await relay.run(self._clock)
                error = UnavailableError("the engine closed a stream before its end; try again")
            except UnavailableError as death:
                error = death
            finally:
                self.sent_bytes += relay.sent_bytes
                self.usage = relay.usage or self.usage
            if splice.done:
                self._complete = not splice.over
                return relay.last
            if splice.sent > sent:
                self._attempts.reset_failures()
            await self._resume(error)

    def close(self) -> None:
        """Cancel the running calls of the request, except one that has sent the whole answer."""
        self._attempt.close(self._splice.tokens, self._complete)

    async def _resume(self, error: UnavailableError) -> None:
        """Make another attempt at the request after `error`.

        If the client has received events, the new attempt first repeats them; otherwise its answer
        replaces the stream. After a token, the attempt must answer within `idle_timeout_s`. Raises
        CannotResumeError if the stream cannot be continued, `error` if no attempts are left, and
        the errors of `Dispatcher.open`.
        """
        splice, outcome = self._splice, "failed"
        try:
            identity = None
            splice.restart()
            if splice.sent:
                # The client may have taken as long to read the last tokens.
                self._attempts.timing.extend(self._attempts.limits.idle_timeout_s)
                identity = _check_resumable(self._attempts.request, splice)
            splice.handed_over = None  # the next engine repeats the recorded tokens
            left, transfer = self._attempt, None
            if isinstance(error, MovedError):
                # The stopping engine holds the KV until its call ends.
                transfer = error.transfer if splice.sent else None
                self._attempts.decode_leaves()
            elif isinstance(error, HandoverError):
                logger.warning("trying to continue a stream with another attempt: %s", error)
            elif (alone := self._attempt.on_prefill) is not None:
                self._attempts.prefill_failed(alone, error)
            else:
                self._attempts.decode_failed(error)
            if not transfer:
                self.close()
            try:
                self._attempt = await self._attempts.open(splice.replay_log(), identity, transfer)
            finally:
                if transfer:
                    left.close(splice.tokens)
            start = self._attempt.start
            if not splice.sent:
                self._first = self._attempt
                self.start, self.local_reason = start, self._attempt.local_reason
                self.first_byte_s = self._attempts.timing.age_s
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
            self._metrics.resumed_streams.labels(outcome).inc()


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
