"""Unfinished work of this router: prompts and streams of one engine, and requests in flight."""

from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from actors.policy.costs import Components
from actors.policy.prompts import Prompt

OVERRUN_SHARE = 0.1
"""Remaining time of overdue work as a fraction of its age, so that a stuck engine looks busier."""

TOGETHER_SHARE = 0.2
"""Fraction of its expected time within which a prompt counts as computed with the previous one."""

FAILING_S = 5.0
"""An engine is ranked last for this time after a failed call.

Without calls, it would seem idle until Serve detects its failure.
"""

SILENT_S = 300.0
"""An engine that sent nothing is ranked last for this time, or until it computes.

A hung engine accepts calls, and each would wait for `silence_timeout_s`. With the default
`transfer.step_s`, Serve replaces the engine in this time (`HUNG_MARGIN_S` in
`actors/engine/heartbeat.py`); with a longer one, one request in each SILENT_S may wait for it.
"""


Measured = tuple[Components, float]  # assumed seconds of each part, and measured ones of all


class _Work(NamedTuple):
    parts: Components = ()
    seconds: float = 0.0  # expected


class PromptQueue:
    """Queued prompts of one engine, first come, first served. Callers choose the keys."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, _Work] = OrderedDict()
        self._waiting_s = 0.0
        self._busy_since = 0.0
        self._unmeasured = _Work()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: int, parts: Components, seconds: float, now: float) -> None:
        """Add work with the cost parts `parts`; expect it to take `seconds` once it is first."""
        if not self._waiting:
            self._begin_next(now)
        self._waiting[key] = _Work(parts, seconds)
        self._waiting_s += seconds

    def wait_s(self, now: float) -> float:
        """Return the expected seconds until all queued work is done."""
        if not self._waiting:
            return 0.0
        age_s = max(now - self._busy_since, 0.0)
        first_s = next(iter(self._waiting.values())).seconds
        return max(first_s - age_s, age_s * OVERRUN_SHARE) + max(self._waiting_s - first_s, 0.0)

    def finish(self, key: int, now: float, parts: Components = ()) -> Measured | None:
        """Remove work; return a measurement if it is one.

        Work that ended out of order or too soon (TOGETHER_SHARE) was computed together with other
        work, so its parts are added to the next measurement.

        ``parts``  cost parts known only now; empty: those given to `add`
        """
        if key not in self._waiting:
            return None
        first, work = self._remove(key)
        before = self._unmeasured
        total = _Work(_sum(before.parts, parts or work.parts), before.seconds + work.seconds)
        elapsed_s = now - self._busy_since
        if not first or elapsed_s < total.seconds * TOGETHER_SHARE:
            if self._waiting:
                self._unmeasured = total
                return None
            if elapsed_s <= 0:
                return None
        self._begin_next(now)
        return total.parts, elapsed_s

    def drop(self, key: int, now: float) -> None:
        if key in self._waiting and self._remove(key)[0]:
            self._begin_next(now)

    def _begin_next(self, now: float) -> None:
        self._busy_since = now
        self._unmeasured = _Work()

    def _remove(self, key: int) -> tuple[bool, _Work]:
        first = next(iter(self._waiting)) == key
        work = self._waiting.pop(key)
        self._waiting_s -= work.seconds
        if not self._waiting:
            self._waiting_s = 0.0  # without the rounding errors of earlier work
        return first, work


class EngineLoad:
    """Work that this router has assigned to one engine, from the routing decision on."""

    def __init__(self) -> None:
        self.prompts = PromptQueue()  # not known to be computed
        self.calls: set[int] = set()  # keys of the requests with an open or expected call
        self.streams: set[int] = set()  # keys of the calls whose stream has started
        self.pieces: Counter[int] = Counter()  # of the prompts of admitted calls, on a decode engine
        self.computed_tokens = 0  # of prompts, by a decode engine for local streams
        self.failed_at: float | None = None  # last failed call
        self.silent_at: float | None = None  # end of a silent call; None once the engine computes
        self._stream_seconds = 0.0
        self._at = 0.0

    def stream_seconds(self, now: float) -> float:
        """Return the running time of all streams so far, summed."""
        self._stream_seconds += len(self.streams) * max(now - self._at, 0.0)
        self._at = max(now, self._at)
        return self._stream_seconds

    def streams_begin(self, key: int, now: float) -> None:
        self.stream_seconds(now)
        self.streams.add(key)

    def streams_end(self, key: int, now: float) -> None:
        self.stream_seconds(now)
        self.streams.discard(key)

    def forget_pieces(self, prompt: Prompt) -> None:
        for passage in prompt.passages:
            for piece in passage.pieces:
                self.pieces[piece] -= 1
                if not self.pieces[piece]:
                    del self.pieces[piece]

    def failing(self, now: float) -> bool:
        failed = self.failed_at is not None and now - self.failed_at < FAILING_S
        return failed or (self.silent_at is not None and now - self.silent_at < SILENT_S)


def _sum(first: Components, second: Components) -> Components:
    return tuple(a + b for a, b in zip(first, second, strict=True)) if first else second


@dataclass
class InflightRequest:
    """A request's legs on a decode engine and, on the remote route, a prefill engine.

    Times are those of the planner's caller, in seconds; None until the event is reported.
    """

    key: int
    prompt: Prompt = field(repr=False)
    decode: str
    prefill: str | None
    prompt_tokens: int  # estimated; the exact number once prefill reports it
    held_tokens: int  # estimated, cached on the engine that computes the prompt
    loaded_tokens: int  # estimated, loaded from this engine's KV store
    decode_held_tokens: int  # estimated, cached on the decode engine
    streams: int  # this router's streams on the decode engine at `Planner.begin`
    # Prefix pieces that each engine caches only if its leg succeeds.
    added: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    admitted: bool = False  # whether it has a slot on the decode engine
    prefilled_at: float | None = None
    opened_at: float | None = None  # time of the first token of a stream
    opened_stream_seconds: float = 0.0  # of the decode engine's load at `opened_at`
    opened_computed_tokens: int = 0  # of the decode engine's load at `opened_at`
    over: bool = False

    @property
    def new_tokens(self) -> int:
        return max(self.prompt_tokens - self.held_tokens - self.loaded_tokens, 1)

    @property
    def moved_tokens(self) -> int:
        return max(self.prompt_tokens - self.decode_held_tokens, 1)
