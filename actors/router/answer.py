"""Answer to a client request. If the engine of a stream fails, another may continue it."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from typing import Any

from actors.errors import CannotResumeError, HandoverError, UnavailableError
from actors.replay_log import RecordedGroups
from actors.request import FirstTokenChunk, ResponseStart, StreamChunk, TokenChunk, TokenGroup, TokenSource
from actors.router.client_request import ClientRequest
from actors.router.dispatch.attempt import Attempt
from actors.router.dispatch.dispatcher import Dispatcher
from actors.router.event_stream import EventStream
from actors.router.request_shaping import why_not_resumable
from actors.telemetry.latency_breakdown import LatencyBreakdown, break_down
from actors.telemetry.recent_requests import Pair
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings.base import RoleName
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

MOST_BYTES = 2**16
"""Size in bytes of joined events at which `body` yields them, even if more events are ready."""


class Answer:
    """Answer to one request, created when a stream's first bytes, or a whole body, have arrived.

    If prefill has sampled the first token (`router.first_token`), decode's answer may not have
    started yet. `body` then waits for it.
    """

    def __init__(self, attempts: Dispatcher, attempt: Attempt, metrics: RouterMetrics) -> None:
        self.start = attempt.start
        self.local_reason = attempt.local_reason
        self.first_byte_s = attempts.timing.age_s
        self._attempts = attempts
        self._attempt = attempt
        self._first = attempt
        """The attempt that produced the first bytes; another attempt may continue the stream."""
        self._metrics = metrics
        self._replay_log = RecordedGroups()
        self._prompt_digest: bytes | None = None
        """Digest of the prompt of the recorded tokens; None if unknown."""
        self._source: TokenSource | None = None
        """Identity of what computed the recorded tokens; None if unknown."""
        request = attempts.request
        self._resumable = why_not_resumable(request.endpoint, request.body) is None
        self._has_tokens = False
        self._awaits_decode = False
        """Whether prefill has sampled the first token, and decode's stream has not started."""
        self._first_group: TokenGroup | None = None
        """First token if prefill sampled it and decode has not repeated it yet, else None."""

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
        """Replicas of the attempt that produced the first bytes."""
        return self._first.pair

    @property
    def prompt_tokens(self) -> int | None:
        """Number of tokens of the prompt; None until, or unless, a prefill engine reports it."""
        return self._first.prompt_tokens

    @property
    def completion_tokens(self) -> int | None:
        """Number of tokens so far of a stream that can be resumed; None for other answers."""
        return self._replay_log.tokens if self.start.streams and self._resumable else None

    @cached_property
    def breakdown(self) -> LatencyBreakdown:
        """Latency breakdown up to the first bytes, computed at the first access.

        Timings of the prefill engine that arrive after the first access are missing in it.
        """
        return break_down(self._attempts.timestamps(self._first))

    @property
    def accounted(self) -> bool:
        """True once the prefill engine's timings have arrived or can no longer arrive.

        The decode engine sends its timings with the first bytes.
        """
        return self._first.accounted.is_set()

    async def account(self, at_most_s: float) -> None:
        """Wait until `accounted` is true, at most `at_most_s` seconds.

        The prefill engine's timings may arrive after the first token.
        """
        with suppress(TimeoutError):
            await asyncio.wait_for(self._first.accounted.wait(), at_most_s)

    async def body(self) -> AsyncGenerator[bytes, None]:
        """Yield whole events of a stream, or the complete body of an answer that is not streamed.

        `start` and `local_reason` are final after the first item. If the engine fails before its
        first event, the answer of another engine, with its own status, replaces the stream. After
        the first event another engine continues the stream, if it can be resumed.

        Raises DeadlineError at the request's deadline, or `idle_timeout_s` after the last token;
        CannotResumeError, UnavailableError or OverloadedError if the engine fails and no engine can
        continue the stream; EngineError for an internal error of the engine.
        """
        stream = EventStream()
        replay_log = self._replay_log
        comments = b""
        ready = b""
        while self._attempt.start.streams:
            try:
                known = len(replay_log)
                items = deque(self._attempt.items)
                while (item := items.popleft() if items else await self._next()) is not None:
                    if isinstance(item, ResponseStart):
                        self._take_over(item, stream)
                        known = len(replay_log)
                        comments = b""
                        continue
                    self._attempt.passed_on(item)
                    if isinstance(item, FirstTokenChunk):
                        self._awaits_decode = True
                        self._check_origin(item, continues=False)
                        if self._source is not None:
                            replay_log.extend(item.groups)
                            self._first_group = item.groups[0]
                            self._attempts.timing.extend(self._attempts.limits.idle_timeout_s)
                    if self._awaits_decode and self._source is None:
                        continue  # decode could not verify that it continues this token
                    if self._resumable and isinstance(item, TokenChunk):
                        # A resumed stream starts with the groups of the replay log.
                        repeated = min(known, len(item.groups))
                        if item.groups and known == len(replay_log):
                            self._check_origin(item, continues=known > 0)
                        elif self._source is None:
                            self._source = item.source
                        self._check_first(item)
                        known -= repeated
                        replay_log.extend(item.groups[repeated:])
                    sent = stream.sent
                    events = comments + stream.feed(_bytes_of(item))
                    if stream.sent == 0:
                        comments = events  # comments do not start the response: its status may change
                        continue
                    comments = b""
                    if stream.sent > sent:
                        self._attempts.reset_failures()
                        self._has_tokens = True
                    ready += events
                    # Under load, joining the data of several tokens reduces the cost of each token.
                    if ready and (sent == 0 or self._attempt.call.waits or len(ready) >= MOST_BYTES):
                        yield ready
                        ready = b""
                    if stream.done and self._awaits_decode:
                        self._metrics.first_tokens.labels("ended").inc()
                        break
                error = UnavailableError("the engine closed a stream before its end; try again")
            except UnavailableError as death:
                error = death
            except TandemError:
                if ready:
                    yield ready
                raise
            if ready:
                yield ready
                ready = b""
            if stream.done:
                return
            await self._resume(error, stream, replay_log)
        yield b"".join(_bytes_of(item) for item in self._attempt.items)

    def _take_over(self, start: ResponseStart, stream: EventStream) -> None:
        """Begin with decode's stream after prefill's first token, which decode repeats.

        Raises HandoverError if decode answered with status 429 or 5xx, and CannotResumeError if it
        answered otherwise and not with a stream.
        """
        if not start.streams:
            answered = f"decode answered HTTP {start.status} after prefill's first token"
            if start.status == HTTPStatus.TOO_MANY_REQUESTS or start.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
                raise HandoverError(answered)
            raise CannotResumeError(f"{answered}; send the request again")
        self._awaits_decode = False
        if stream.sent == 0:
            # Prefill has sent no whole event, so the client receives decode's token.
            self._attempt.sampled_by, self._first_group = "decode", None
            self._forget_tokens()
        stream.restart()

    def _forget_tokens(self) -> None:
        """Forget the recorded tokens and their prompt: the client has not received them."""
        self._replay_log.clear()
        self._prompt_digest = self._source = None

    def _check_origin(self, item: TokenChunk | FirstTokenChunk, continues: bool) -> None:
        """Record prompt and source of an attempt's tokens from `item`, its first chunk with any.

        If it continues the recorded tokens, instead raise CannotResumeError unless both are equal.
        The engines may have fetched different content from one image URL, a chat template may have
        inserted another date, or a host may have another adapter at the same path. Raise
        HandoverError if decode does not know yet which adapter it continues prefill's token with.
        """
        if not continues:
            self._prompt_digest, self._source = item.prompt_digest, item.source
            return
        if item.source is None and self._first_group is not None:
            self._metrics.first_tokens.labels("replayed").inc()
            raise HandoverError("decode has not reported which adapter continues prefill's first token")
        if item.source is None or item.source != self._source:
            problem = "the next engine computes with another model or adapter, or cannot verify which"
        elif item.prompt_digest != self._prompt_digest:
            problem = (
                "the next engine built a different prompt from this request, for example because an image URL returned "
                "different content"
            )
        else:
            return
        if self._first_group is None:
            self._metrics.resumed_streams.labels("refused").inc()
        else:
            self._metrics.first_tokens.labels("refused").inc()
        raise CannotResumeError(f"the stream cannot be continued: {problem}; send the request again")

    def _check_first(self, item: StreamChunk) -> None:
        """Compare decode's first token with prefill's, once, and count the result in the metrics.

        Raises HandoverError if they differ.
        """
        expected, self._first_group = self._first_group, None
        if expected is not None and item.groups[:1] != (expected,):
            self._metrics.first_tokens.labels("replayed").inc()
            raise HandoverError(f"prefill sampled the first token {expected}, but decode sampled {item.groups[:1]}")
        if expected is not None:
            self._metrics.first_tokens.labels("repeated").inc()

    def close(self) -> None:
        """Cancel the running calls of the request."""
        self._attempt.close()

    async def _next(self) -> Any:
        limits, timing = self._attempts.limits, self._attempts.timing
        if self._has_tokens and self._attempt.call.waits:
            timing.extend(limits.idle_timeout_s)
        return await self._attempt.call.next(limits.silence_timeout_s, timing.ends_at)

    async def _resume(self, error: UnavailableError, stream: EventStream, replay_log: RecordedGroups) -> None:
        """Make another attempt at the request after `error`.

        If the client has received events, the new attempt first repeats `replay_log`; otherwise its
        answer replaces the stream. After a token, the attempt must answer within `idle_timeout_s`.
        Raises CannotResumeError if the stream cannot be continued, `error` if no attempts are left,
        and the errors of `Dispatcher.open`.
        """
        outcome = "failed"
        if self._has_tokens:
            # The client may have taken as long to read the last tokens.
            self._attempts.timing.extend(self._attempts.limits.idle_timeout_s)
        try:
            identity = None
            if stream.sent == 0:
                self._forget_tokens()  # the client has received nothing: a new answer may differ
            else:
                identity = _check_resumable(self._attempts.request, replay_log, self._source)
            self._awaits_decode = False
            self._first_group = None  # the next engine repeats the replay log
            if isinstance(error, HandoverError):
                logger.warning("trying to continue a stream with another attempt: %s", error)
            elif (alone := self._attempt.on_prefill) is not None:
                self._attempts.prefill_failed(alone, error)
            else:
                self._attempts.decode_failed(error)
            self._attempt.close()
            self._attempt = await self._attempts.open(replay_log.replay_log(), identity)
            start = self._attempt.start
            if stream.sent == 0:
                self._first = self._attempt
                self.start, self.local_reason = start, self._attempt.local_reason
                self.first_byte_s = self._attempts.timing.age_s
            elif not start.streams:
                raise CannotResumeError(
                    f"the engine that should continue the stream answered HTTP {start.status}; send the request again"
                )
            stream.restart()
            outcome = "resumed"
        except CannotResumeError:
            outcome = "refused"
            raise
        finally:
            self._metrics.resumed_streams.labels(outcome).inc()


def _check_resumable(request: ClientRequest, replay_log: RecordedGroups, source: TokenSource | None) -> str:
    """Return the identity of the engines that can continue the stream of a failed engine.

    Raises CannotResumeError if none can.
    """
    if reason := why_not_resumable(request.endpoint, request.body):
        raise CannotResumeError(
            f"the engine has failed, and a stream with {reason} cannot be continued on another engine; "
            "send the request again"
        )
    if not replay_log:
        raise CannotResumeError(
            "the engine has failed and sent no record of the stream's tokens; send the request again"
        )
    if source is None:
        raise CannotResumeError(
            "the engine has failed and has not reported which model and adapter computed the stream's tokens; send the "
            "request again"
        )
    return source.engine


def _bytes_of(item: Any) -> bytes:
    return item.body if isinstance(item, StreamChunk) else item
