"""Decide whether a request loads stored KV, and how long it may wait for it.

A *load* reads stored KV of a prompt's first tokens from files. Without it, the engine computes
these tokens, or a transfer from the prefill engine supplies them. Waiting for a load pays only if
it takes less time than this alternative, so a request waits at most as long as the alternative
takes. All rates are measured in this engine. Sans-I/O: the caller measures.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

SAMPLES = 16
"""Maximum number of latest transfers, and of latest steps, that the estimates use."""

LOADS = 8
"""Maximum number of latest loads of a tier that its estimate uses."""

FIRST_PAUSE, LONGEST_PAUSE = 4, 64
"""Number of loads that a slow tier loses between two trials: at first, and at most.

It doubles with each trial that found the tier slow.
"""


ASSUMED_TOKEN_S = 1e-4
"""Cost of a token for eviction, before the engine has measured its computation."""


class LoadCosts:
    """Measured rates of loads by tier, of transfers, and of the engine's computation.

    The time of a transfer includes prefill's computation, so the fastest transfer estimates the
    link's rate. The other estimates are medians: a pause of the machine does not change them.
    """

    def __init__(self) -> None:
        self._tiers: dict[str, _Tier] = {}
        self._transfers: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        self._steps: deque[tuple[int, float]] = deque(maxlen=SAMPLES)

    def loaded(self, tier: str, size_bytes: int, seconds: float) -> None:
        """Record the usable bytes and the duration of an ended load.

        ``tier``        label of the slowest tier that the load read
        ``size_bytes``  0 if the request can use none of what the load read
        """
        self._tier(tier).record(size_bytes, seconds)

    def transferred(self, size_bytes: int, seconds: float) -> None:
        """Record the bytes and duration of a finished transfer; ignore it if either is 0."""
        if size_bytes > 0 and seconds > 0:
            self._transfers.append((size_bytes, seconds))

    def computed(self, tokens: int, seconds: float) -> None:
        """Record the tokens and the duration of an engine step; ignore it if either is 0."""
        if tokens > 0 and seconds > 0:
            self._steps.append((tokens, seconds))

    def transfer_s(self, size_bytes: int) -> float:
        """Return the estimated seconds of a transfer; infinite before the first transfer."""
        return size_bytes * min((seconds / size for size, seconds in self._transfers), default=math.inf)

    def compute_s(self, tokens: int) -> float:
        """Return the estimated seconds of the computation; infinite before the first step."""
        if not self._steps:
            return math.inf
        return tokens * _median(seconds / each for each, seconds in self._steps)

    def token_cost_ns(self) -> int:
        """Return what a stored token is worth to eviction, in nanoseconds of computation.

        Rounded to a power of 2: objects of one model then cost the same, although measurements
        vary, and their last use decides. Objects of another model in the same folder may cost more.
        """
        token_s = self.compute_s(1) if self._steps else ASSUMED_TOKEN_S
        return 1 << max(0, round(math.log2(1e9 * token_s)))

    def load_s(self, sizes: Mapping[str, int]) -> float:
        """Return the estimated seconds of a load.

        Tiers are read concurrently, so the slowest one decides.

        ``sizes``  bytes to read, by tier. A tier without recorded loads takes 0 seconds, one of
                   whose recorded loads half have 0 bytes takes infinite time
        """
        return max((self._tier(tier).read_s(size) for tier, size in sizes.items()), default=0.0)

    def patience_s(self, sizes: Mapping[str, int], otherwise_s: float) -> float:
        """Return the longest time to wait for a load, in seconds; 0: do not load.

        The result is ``otherwise_s``, or 0 if the load would take at least as long. After some
        results of 0, a slow tier is tried again, so a tier that recovers is used again.

        ``sizes``        bytes to read, by tier
        ``otherwise_s``  estimated time without the load
        """
        tiers = [(self._tier(tier), size) for tier, size in sizes.items()]
        slow = [tier for tier, size in tiers if tier.read_s(size) >= otherwise_s]
        if not slow:
            for tier, _ in tiers:
                tier.leave_trial()
            return otherwise_s
        tried = [tier.try_again() for tier in slow]  # each slow tier counts this load
        return otherwise_s if all(tried) else 0.0

    def _tier(self, label: str) -> _Tier:
        return self._tiers.setdefault(label, _Tier())


class _Tier:
    """Measured loads of one tier, and the pauses between trials while it is slow."""

    def __init__(self) -> None:
        self._loads: deque[tuple[int, float]] = deque(maxlen=LOADS)
        self._pause = FIRST_PAUSE
        self._lost = 0
        # Whether the next measurement replaces all earlier ones.
        self._on_trial = False

    def record(self, size_bytes: int, seconds: float) -> None:
        if self._on_trial:
            self._loads.clear()
            self._on_trial = False
        self._loads.append((size_bytes, seconds))

    def read_s(self, size_bytes: int) -> float:
        if not self._loads:
            return 0.0
        return size_bytes * _median(seconds / read if read else math.inf for read, seconds in self._loads)

    def leave_trial(self) -> None:
        if not self._on_trial:
            self._pause, self._lost = FIRST_PAUSE, 0

    def try_again(self) -> bool:
        """Count a load that would be slow; return whether to load nevertheless, as a trial."""
        self._lost += 1
        if self._lost <= self._pause:
            return False
        self._pause, self._lost = min(2 * self._pause, LONGEST_PAUSE), 0
        self._on_trial = True
        return True


def _median(values: Iterable[float]) -> float:
    """Return the middle value, or the greater of the two middle ones."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
