"""Decide whether a request loads stored KV, and how long it may wait for it.

A *load* reads stored KV of a prompt's first tokens from files and copies it into blocks. Without
it, the engine computes these tokens, or a transfer from the prefill engine supplies them. Waiting
for a load pays only if it takes less time than this alternative, so a request waits at most as long
as the alternative takes. All rates are measured in this engine. Sans-I/O: the caller measures.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping

SAMPLES = 16
"""Maximum number of latest transfers, and of latest copies, that the estimates use."""

STEPS = 32
"""Maximum number of latest steps that the estimate of the computation uses."""

LOADS = 8
"""Maximum number of latest loads of a tier that its estimate uses."""

FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Number of declined loads between two trials of a slow tier: first and maximum.

It doubles with each trial.
"""


class LoadCosts:
    """Measured rates of loads by tier, of transfers, and of the engine's computation.

    The time of a transfer includes prefill's computation, so the fastest transfer estimates the
    link's rate. The other estimates are medians: a pause of the machine does not change them.
    """

    def __init__(self) -> None:
        self._tiers: dict[str, _Tier] = {}
        self._transfers: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        self._copies: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        # Whether the next copy replaces all earlier ones.
        self._copies_on_trial = False
        # Mean context of the tokens of a step, and seconds per token.
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)
        # Seconds of a token without context, and per token of context; None: steps have changed.
        self._token_s: tuple[float, float] | None = None

    def read(self, tier: str, size_bytes: int, seconds: float) -> None:
        """Record the usable bytes and the duration of ended reads of a tier.

        ``size_bytes``  0 if no read has ended in ``seconds``
        """
        self._tier(tier).record(size_bytes, seconds)

    def copied(self, size_bytes: int, seconds: float) -> None:
        """Record the bytes and duration of copies into blocks; ignore them if either is 0."""
        if size_bytes > 0 and seconds > 0:
            if self._copies_on_trial:
                self._copies.clear()
                self._copies_on_trial = False
            self._copies.append((size_bytes, seconds))

    def transferred(self, size_bytes: int, seconds: float) -> None:
        """Record the bytes and duration of a finished transfer; ignore it if either is 0."""
        if size_bytes > 0 and seconds > 0:
            self._transfers.append((size_bytes, seconds))

    def computed(self, tokens: int, context_tokens: float, seconds: float) -> None:
        """Record the tokens and the duration of an engine step; ignore it if either is 0.

        ``context_tokens``  mean number of tokens that the step's tokens attend to
        """
        if tokens > 0 and seconds > 0:
            self._steps.append((context_tokens, seconds / tokens))
            self._token_s = None

    def transfer_s(self, size_bytes: int) -> float:
        """Return the estimated seconds of a transfer; infinite before the first transfer."""
        return size_bytes * min((seconds / size for size, seconds in self._transfers), default=math.inf)

    def compute_s(self, start_token: int, end_token: int) -> float:
        """Return the estimated seconds to compute ``[start_token, end_token)`` of a prompt.

        Infinite before the first step.
        """
        if not self._steps:
            return math.inf
        if self._token_s is None:
            self._token_s = _line(self._steps)
        alone_s, context_s = self._token_s
        return (end_token - start_token) * (alone_s + context_s * (start_token + end_token) / 2)

    def load_s(self, sizes: Mapping[str, int]) -> float:
        """Return the estimated seconds of a load.

        Tiers are read concurrently, so the slowest one decides.

        ``sizes``  bytes to read, by tier. A tier without recorded reads takes 0 seconds, one of
                   whose recorded reads half have 0 bytes takes infinite time
        """
        reads_s = max((self._tier(tier).read_s(size) for tier, size in sizes.items()), default=0.0)
        return reads_s + self._copy_s(sizes)

    def patience_s(self, sizes: Mapping[str, int], otherwise_s: float) -> float:
        """Return the longest time to wait for a load, in seconds; 0: do not load.

        The result is ``otherwise_s``, or 0 if the load would take at least as long. After some
        results of 0, a slow tier is tried again, so a tier that recovers is used again. If nothing
        is known of the alternative, the request loads.

        ``sizes``        bytes to read, by tier
        ``otherwise_s``  estimated time without the load; infinite: unknown
        """
        if math.isinf(otherwise_s):
            return otherwise_s
        tiers = [(self._tier(tier), size) for tier, size in sizes.items()]
        left_s = otherwise_s - self._copy_s(sizes)
        slow = [tier for tier, size in tiers if tier.read_s(size) >= left_s]
        if not slow:
            for tier, _ in tiers:
                tier.shorten_pauses()
            return otherwise_s
        for tier in slow:
            tier.declined += 1
        if any(tier.declined <= tier.pause for tier in slow):
            return 0.0
        for tier in slow:
            tier.begin_trial()
        # Copies are on trial if the reads alone were fast enough.
        self._copies_on_trial = any(tier.read_s(size) < otherwise_s for tier, size in tiers if tier in slow)
        return otherwise_s

    def _copy_s(self, sizes: Mapping[str, int]) -> float:
        if not self._copies:
            return 0.0
        return sum(sizes.values()) * _median(seconds / size for size, seconds in self._copies)

    def _tier(self, label: str) -> _Tier:
        return self._tiers.setdefault(label, _Tier())


class _Tier:
    """Measured reads of one tier, and the pauses between trials while it is slow.

    ``declined``  number of loads declined since the last trial
    ``pause``     number of declined loads before the next trial
    """

    def __init__(self) -> None:
        self.declined = 0
        self.pause = FIRST_PAUSE
        self._reads: deque[tuple[int, float]] = deque(maxlen=LOADS)
        # Whether the next measurement replaces all earlier ones.
        self._on_trial = False

    def record(self, size_bytes: int, seconds: float) -> None:
        if self._on_trial:
            self._reads.clear()
            self._on_trial = False
        self._reads.append((size_bytes, seconds))

    def read_s(self, size_bytes: int) -> float:
        if not self._reads:
            return 0.0
        return size_bytes * _median(seconds / read if read else math.inf for read, seconds in self._reads)

    def shorten_pauses(self) -> None:
        """Make the pauses short again, unless a trial has not ended."""
        if not self._on_trial:
            self.pause, self.declined = FIRST_PAUSE, 0

    def begin_trial(self) -> None:
        self.pause, self.declined = min(2 * self.pause, LONGEST_PAUSE), 0
        self._on_trial = True


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of a line through points, by medians (Theil and Sen).

    Neither is negative.
    """
    known = list(points)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(known, 2) if a[0] != b[0]]
    slope = max(0.0, _median(slopes)) if slopes else 0.0
    return max(0.0, _median(y - slope * x for x, y in known)), slope


def _median(values: Iterable[float]) -> float:
    """Return the middle value, or the greater of the two middle ones."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
