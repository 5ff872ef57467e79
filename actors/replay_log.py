"""A call in its engine's actor: its timings, and its answer as a replay log, from which another
engine can resume it.

A token group is the token ids of one output of the engine core to vLLM's serving layer. The engine
sends each group to the router no later than the bytes that the serving layer generated from it. On
resume, another engine first emits the groups of the replay log, then continues. Times are on the
host's monotonic clock, as in vLLM.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field, replace
from typing import Any

from actors.errors import CannotResumeError, TandemError
from actors.request import (
    EngineTimings,
    FirstTokenChunk,
    ReplayLog,
    StreamChunk,
    TokenChunk,
    TokenGroup,
    TokenSource,
)

Arrival = tuple[float, float, bool]
"""Start and end of a transfer on the host's monotonic clock in seconds, and whether it failed."""


@dataclass(frozen=True)
class KvTimes:
    """Times of one request's transfer, and of its lookup in the KV store; None without one."""

    arrival: Arrival | None = None
    fetch: tuple[float, float] | None = None


@dataclass
class ServedCall:
    """A running call in its engine's actor: its replay log, new groups, timings and error.

    ``data_parallel_rank``  the engine core that computes the call
    ``began_at``            monotonic time from which the timings count
    """

    replay: ReplayLog = ()
    data_parallel_rank: int = 0
    problem: TandemError | None = None
    taken: Callable[[], None] = lambda: None
    """Called after the serving layer has processed an output."""
    began_at: float = field(default_factory=lambda: time.monotonic())
    request_id: str | None = None
    """Id of the call's first request in the engine core."""
    first_token: asyncio.Future[None] | None = None
    """Done when the engine has sampled the first token of an answer that is not streamed.

    Never done if this token ends the answer. None: not reported.
    """
    prompt_tokens: int | None = None
    """Set with the first token that a prefill engine samples for the client; else None."""
    prompt_digest: bytes | None = None
    source: Callable[[], TokenSource | None] = lambda: None
    """Returns the identity of what computes the tokens; None while it is unknown."""
    split_first: bool = False
    """Whether the outputs of this call's next engine request pass through a `ReplayCollector`."""
    unfinished: bool = False
    """Whether another engine continues the answer, unless the first token ends it."""
    emitted: deque[int] = field(default_factory=deque)
    """Tokens that vLLM's frontend has to process before the engine's own first output."""
    prefilled: int = 0
    """Number of tokens of `replay` that the engine computes with the prompt."""
    transfer: Mapping[str, Any] | None = None
    """Parameters of the KV of the prompt and of `replay`; None: this engine computes them."""
    movable: bool = False
    """Whether another engine may continue the stream before its end."""
    moved: Callable[[Mapping[str, Any]], None] = lambda _: None
    """Called after the last output of a stream that moves, with the parameters of its KV."""
    moves_as: str | None = None
    """Transfer id of the stream's KV; None before the stream is told to move."""
    recorded: int = 0
    """Number of tokens so far."""
    _identified: bool = False
    _sampled: bool = False
    _new: deque[TokenGroup] = field(default_factory=deque)
    _began: bool = False
    _sent_at: float | None = None
    _is_timed: bool = False
    _timings: EngineTimings | None = None

    def begin(self) -> bool:
        """Return whether this is the call's first generation: only that one is recorded."""
        first, self._began = not self._began, True
        return first

    def record(self, tokens: Sequence[int]) -> None:
        if tokens:
            self._new.append(tuple(tokens))
            self.recorded += len(tokens)

    @property
    def repeats(self) -> bool:
        """True while the outputs so far are of prefilled tokens: the engine may not have the KV."""
        return 0 < self.prefilled >= self.recorded

    @property
    def may_move(self) -> bool:
        """True if the stream can move now: no engine continues one of unknown source."""
        return self.movable and self._identified

    def sampled(self) -> None:
        """Make the next chunk a StreamChunk, even if no token group is recorded."""
        self._sampled = True

    def sent_to_engine(self, request_id: str) -> None:
        """Record that the call's first request is sent to the engine core.

        The core receives requests between two steps. The wait for the end of a step counts as queue
        time; vLLM's own timestamp `queued_ts` excludes it.
        """
        self.request_id = request_id
        self._sent_at = time.monotonic()

    def computed(self, stats: Any, times: KvTimes) -> None:
        """Record vLLM's RequestStateStats and KV times at the first output; ignore later calls.

        Records nothing without statistics (`disable_log_stats`).
        """
        if self._is_timed or stats is None or not (stats.queued_ts and stats.scheduled_ts):
            return
        self._is_timed = True
        asked_at, ended_at, failed = times.arrival or (None, None, False)
        fetch_began_at, fetch_ended_at = times.fetch or (None, None)
        self._timings = EngineTimings(
            queued_s=(self._sent_at or stats.queued_ts) - self.began_at,
            scheduled_s=stats.scheduled_ts - self.began_at,
            first_token_s=stats.first_token_ts - self.began_at,
            answered_s=0.0,
            kv_asked_s=None if asked_at is None else asked_at - self.began_at,
            kv_ended_s=None if ended_at is None else ended_at - self.began_at,
            kv_failed=failed,
            store_asked_s=None if fetch_began_at is None else fetch_began_at - self.began_at,
            store_ended_s=None if fetch_ended_at is None else fetch_ended_at - self.began_at,
        )

    def take_timings(self) -> EngineTimings | None:
        """Return the timings, up to now, at the first call after the first token; else None."""
        timings, self._timings = self._timings, None
        return timings and replace(timings, answered_s=time.monotonic() - self.began_at)

    def sampled_first(self) -> None:
        if self.first_token is not None and not self.first_token.done():
            self.first_token.set_result(None)

    def chunk(self, body: bytes) -> bytes | StreamChunk:
        """Return `body` with the tokens and timings since the last chunk, or alone without any."""
        timings = self.take_timings()
        if not self._sampled and not self._new and timings is None:
            return body
        self._sampled = False
        groups = tuple(self._new)
        self._new.clear()
        digest = source = None
        if groups:
            digest, self.prompt_digest = self.prompt_digest, None
            if (source := self.source()) is not None:
                self.source = lambda: None
                self._identified = True
        if self.prompt_tokens is not None:
            prompt_tokens, self.prompt_tokens = self.prompt_tokens, None
            return FirstTokenChunk(body, groups, timings, prompt_tokens, digest, source)
        prefilled = self.prefilled if groups and self.recorded == sum(map(len, groups)) else 0
        return TokenChunk(body, groups, timings, digest, source, prefilled)

    def fail(self, why: str) -> TandemError:
        return self.end(CannotResumeError(why))

    def end(self, problem: TandemError) -> TandemError:
        self.problem = problem
        return problem

    def check(self) -> None:
        """Raise the recorded error: vLLM's serving layer has converted it to a response."""
        if self.problem is not None:
            raise self.problem

    def context(self) -> Context:
        context = copy_context()
        context.run(SERVED_CALL.set, self)
        return context


SERVED_CALL: ContextVar[ServedCall | None] = ContextVar("served", default=None)


class KvArrivals:
    """Reports in connector statistics: times of KV transfers and store fetches of running requests,
    and identities of LoRA adapters.
    """

    def __init__(self) -> None:
        self._found: dict[str, KvTimes] = {}
        self._adapters: dict[tuple[int, str], str] = {}
        self.waiting: dict[int, int] = {}
        """Number of requests that vLLM had not begun at the last step, by data-parallel rank."""

    def expect(self, request_id: str) -> None:
        """Collect the times of this request until `take`; other requests are ignored."""
        self._found[request_id] = KvTimes()

    def take(self, request_id: str | None) -> KvTimes:
        return KvTimes() if request_id is None else self._found.pop(request_id, KvTimes())

    def adapter(self, rank: int, adapter: str) -> str:
        """Return the identity of an adapter's content on a data-parallel rank; empty if unknown."""
        return self._adapters.get((rank, adapter), "")

    def observe(self, connector_stats: Mapping[str, Any] | None, rank: int = 0) -> None:
        stats = connector_stats or {}
        for adapter, identity in (stats.get("adapters") or {}).items():
            self._adapters[rank, adapter] = identity
            if not identity:
                del self._adapters[rank, adapter]
        for request_id, (asked_at, ended_at, failed) in (stats.get("arrivals") or {}).items():
            if request_id in self._found:
                self._found[request_id] = replace(self._found[request_id], arrival=(asked_at, ended_at, bool(failed)))
        for request_id, (began_at, ended_at) in (stats.get("fetches") or {}).items():
            if request_id in self._found:
                self._found[request_id] = replace(self._found[request_id], fetch=(began_at, ended_at))
