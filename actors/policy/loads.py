"""Unfinished work of this router on one engine: queued prompts and running streams."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from actors.policy.estimates import Components

OVERRUN_SHARE = 0.1
"""Remaining time of overdue work as a fraction of its age, so that a stuck engine looks busier."""

TOGETHER_SHARE = 0.2
"""Fraction of a prompt's expected time.

A prompt that ends sooner than this after the previous one is measured together with the next
prompt, if another one is queued.
"""

FAILING_S = 5.0
"""Time in seconds for which an engine is ranked last after a call to it failed.

Without calls, such an engine would seem idle until Serve detects its failure.
"""

SILENT_S = 300.0
"""Time in seconds for which an engine is ranked last after it was silent, or until it computes.

A hung engine accepts calls, and each would wait for `silence_timeout_s`. With the defaults
of `transfer.step_s` and `silence_timeout_s`, Serve replaces the engine within this time
(`HUNG_MARGIN_S` in `actors/engine/heartbeat.py`). With a longer `transfer.step_s`, one request may
wait for the hung engine after each SILENT_S.
"""


class _Work(NamedTuple):
    """Cost parts and expected seconds of prompts."""

    parts: Components = ()
    seconds: float = 0.0


class PromptQueue:
    """Queued prompts of one engine, first come, first served. Callers choose the keys."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, _Work] = OrderedDict()
        self._waiting_s = 0.0
        """Sum of the expected seconds of the work in `_waiting`."""
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

    def finish(self, key: int, now: float, parts: Components = ()) -> tuple[Components, float] | None:
        """Remove finished work; return the cost parts and the seconds of a measurement.

        ``parts``  cost parts known only now; empty: those given to `add`

        Return None for an unknown key, or if no time has passed. While other work is queued, return
        None for work that ended out of order or too soon (TOGETHER_SHARE): the engine computed it
        together with other work, so its parts are added to the next measurement.
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
        """Remove work, but make no measurement; ignore an unknown key."""
        if key in self._waiting and self._remove(key)[0]:
            self._begin_next(now)

    def _begin_next(self, now: float) -> None:
        self._busy_since = now
        self._unmeasured = _Work()

    def _remove(self, key: int) -> tuple[bool, _Work]:
        """Remove work; return whether it was first, and the work."""
        first = next(iter(self._waiting)) == key
        work = self._waiting.pop(key)
        self._waiting_s -= work.seconds
        if not self._waiting:
            self._waiting_s = 0.0  # without the rounding errors of earlier work
        return first, work


class EngineLoad:
    """Work that this router has assigned to one engine, from the routing decision on.

    ``prompts``          prompts assigned to the engine and not known to be computed
    ``calls``            keys of the requests with an open or expected call to the engine
    ``streams``          keys of the calls whose stream has started
    ``computed_tokens``  prompt tokens that a decode engine has computed so far for local streams
    ``failed_at``        time in seconds of the last failed call; None before the first
    ``silent_at``        time in seconds at which the last call ended because the engine sent
                         nothing; None before the first, and once the engine computes again
    """

    def __init__(self) -> None:
        self.prompts = PromptQueue()
        self.calls: set[int] = set()
        self.streams: set[int] = set()
        self.computed_tokens = 0
        self.failed_at: float | None = None
        self.silent_at: float | None = None
        self._stream_seconds = 0.0
        self._at = 0.0

    def stream_seconds(self, now: float) -> float:
        """Return the running time of all streams so far, summed, in seconds."""
        self._stream_seconds += len(self.streams) * max(now - self._at, 0.0)
        self._at = max(now, self._at)
        return self._stream_seconds

    def streams_begin(self, key: int, now: float) -> None:
        self.stream_seconds(now)
        self.streams.add(key)

    def streams_end(self, key: int, now: float) -> None:
        self.stream_seconds(now)
        self.streams.discard(key)

    def failing(self, now: float) -> bool:
        failed = self.failed_at is not None and now - self.failed_at < FAILING_S
        return failed or (self.silent_at is not None and now - self.silent_at < SILENT_S)


def _sum(first: Components, second: Components) -> Components:
    return tuple(a + b for a, b in zip(first, second, strict=True)) if first else second
