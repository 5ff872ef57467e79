"""Decide whether a request loads stored KV, and how long it may wait for the load. Sans-I/O.

Without a load, the engine computes the tokens, or a transfer supplies their KV. A request waits no
longer than the estimated time of this alternative. The engine measures all rates itself.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

# Numbers of the latest transfers (and copies), steps, and loads per tier in the estimates.
SAMPLES, STEPS, LOADS = 16, 32, 8

# Number of declined loads after which one loads as a trial, whose rates replace those of tiers and
# copies: without new measurements, a tier would keep the rate of its slowest period.
TRY_AGAIN_AFTER = 32


class LoadCosts:
    """Measured rates of loads by tier, of transfers, and of the engine's computation.

    The time of a transfer includes prefill's computation, so the fastest one estimates the link's
    rate. The other estimates are medians, so a pause of the machine does not distort them.
    """

    def __init__(self) -> None:
        # Seconds per byte.
        self._tiers: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LOADS))
        self._transfers: deque[float] = deque(maxlen=SAMPLES)
        self._copies: deque[float] = deque(maxlen=SAMPLES)
        self._declined = 0
        self._on_trial = False
        # Mean context of the tokens of a step, and seconds per token.
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)
        # Seconds of a token without context, and per token of context; None: to be recomputed.
        self._token_s: tuple[float, float] | None = None

    def read(self, tier: str, size_bytes: int, seconds: float) -> None:
        """Record completed reads of a tier; 0 bytes: no read has completed within ``seconds``."""
        if self._on_trial:
            self._on_trial = False
            self._tiers.clear()
            self._copies.clear()
        self._tiers[tier].append(seconds / size_bytes if size_bytes else math.inf)

    def copied(self, size_bytes: int, seconds: float) -> None:
        if size_bytes > 0 and seconds > 0:
            self._copies.append(seconds / size_bytes)

    def transferred(self, size_bytes: int, seconds: float) -> None:
        if size_bytes > 0 and seconds > 0:
            self._transfers.append(seconds / size_bytes)

    def computed(self, tokens: int, context_tokens: float, seconds: float) -> None:
        """Record a step. ``context_tokens``: mean number of tokens to which its tokens attend."""
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
        """Return seconds that a load of ``sizes`` may take: ``otherwise_s``, or 0 if not faster.

        ``otherwise_s``  estimated time without the load; infinite: unknown, so the request loads
        """
        if math.isinf(otherwise_s):
            return otherwise_s
        left_s = otherwise_s - sum(sizes.values()) * _median(self._copies)
        if all(size * _median(self._tiers[tier]) < left_s for tier, size in sizes.items()):
            return otherwise_s
        self._declined += 1
        if self._declined % TRY_AGAIN_AFTER:
            return 0.0
        self._on_trial = True
        return otherwise_s


def _line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    # Theil-Sen estimator: medians ignore outliers.
    known = list(points)
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(known, 2) if a[0] != b[0]]
    slope = max(0.0, _median(slopes)) if slopes else 0.0
    return max(0.0, _median(y - slope * x for x, y in known)), slope


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
