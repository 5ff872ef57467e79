"""Decide whether a request loads stored KV, and how long it may wait for it.

Without a load, the engine computes the tokens, or a transfer supplies their KV. A request waits at
most as long as this alternative takes. All rates are measured in this engine. Sans-I/O.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

# Latest transfers and copies, steps, and loads of a tier that the estimates use.
SAMPLES, STEPS, LOADS = 16, 32, 8

# Declined loads between two trials of a slow tier; the number doubles with each trial.
FIRST_PAUSE, LONGEST_PAUSE = 4, 64


class LoadCosts:
    """Measured rates of loads by tier, of transfers, and of the engine's computation.

    The time of a transfer includes prefill's computation, so the fastest transfer estimates the
    link's rate. The other estimates are medians: a pause of the machine does not change them.
    """

    def __init__(self) -> None:
        self._tiers: defaultdict[str, _Tier] = defaultdict(_Tier)
        # Seconds per byte.
        self._transfers: deque[float] = deque(maxlen=SAMPLES)
        self._copies = _Rate(SAMPLES)
        # Mean context of the tokens of a step, and seconds per token.
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)
        # Seconds of a token without context, and per token of context; None: steps have changed.
        self._token_s: tuple[float, float] | None = None

    def read(self, tier: str, size_bytes: int, seconds: float) -> None:
        """Record ended reads of a tier; ``size_bytes`` is 0 if no read has ended in ``seconds``."""
        self._tiers[tier].record(seconds / size_bytes if size_bytes else math.inf)

    def copied(self, size_bytes: int, seconds: float) -> None:
        if size_bytes > 0 and seconds > 0:
            self._copies.record(seconds / size_bytes)

    def transferred(self, size_bytes: int, seconds: float) -> None:
        if size_bytes > 0 and seconds > 0:
            self._transfers.append(seconds / size_bytes)

    def computed(self, tokens: int, context_tokens: float, seconds: float) -> None:
        """``context_tokens``: to how many the step's tokens attend in the mean."""
        if tokens > 0 and seconds > 0:
            self._steps.append((context_tokens, seconds / tokens))
            self._token_s = None

    def transfer_s(self, size_bytes: int) -> float:
        return size_bytes * min(self._transfers, default=math.inf)

    def compute_s(self, start_token: int, end_token: int) -> float:
        if not self._steps:
            return math.inf
        if self._token_s is None:
            self._token_s = _line(self._steps)
        alone_s, context_s = self._token_s
        return (end_token - start_token) * (alone_s + context_s * (start_token + end_token) / 2)

    def patience_s(self, sizes: Mapping[str, int], otherwise_s: float) -> float:
        """Return ``otherwise_s``, or 0 if a load of ``sizes`` would take at least as long.

        After some results of 0, a slow tier is tried again, so a tier that recovers is used again.

        ``otherwise_s``  estimated time without the load; infinite: unknown, so the request loads
        """
        if math.isinf(otherwise_s):
            return otherwise_s
        tiers = [(self._tiers[tier], size) for tier, size in sizes.items()]
        left_s = otherwise_s - self._copies.seconds(sum(sizes.values()))
        slow = [tier for tier, size in tiers if tier.seconds(size) >= left_s]
        if not slow:
            for tier, _ in tiers:
                if not tier.on_trial:
                    tier.pause, tier.declined = FIRST_PAUSE, 0
            return otherwise_s
        for tier in slow:
            tier.declined += 1
        if any(tier.declined <= tier.pause for tier in slow):
            return 0.0
        for tier in slow:
            tier.pause, tier.declined, tier.on_trial = min(2 * tier.pause, LONGEST_PAUSE), 0, True
        # Copies are on trial if the reads alone were fast enough.
        self._copies.on_trial = any(tier.seconds(size) < otherwise_s for tier, size in tiers if tier in slow)
        return otherwise_s


class _Rate:
    """Median of measurements, in seconds per byte; one ``on_trial`` replaces all earlier ones."""

    def __init__(self, samples: int) -> None:
        self.on_trial = False
        self._samples: deque[float] = deque(maxlen=samples)

    def record(self, byte_s: float) -> None:
        if self.on_trial:
            self._samples.clear()
            self.on_trial = False
        self._samples.append(byte_s)

    def seconds(self, size_bytes: int) -> float:
        return size_bytes * _median(self._samples) if self._samples else 0.0


class _Tier(_Rate):
    """Reads of a tier; loads declined since its last trial and before the next one."""

    def __init__(self) -> None:
        super().__init__(LOADS)
        self.declined, self.pause = 0, FIRST_PAUSE


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    # By medians (Theil and Sen).
    known = list(points)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(known, 2) if a[0] != b[0]]
    slope = max(0.0, _median(slopes)) if slopes else 0.0
    return max(0.0, _median(y - slope * x for x, y in known)), slope


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
