"""Learn costs from measurements. Old measurements fade, and outliers are clipped.

`Regression` learns the parts of a cost for all engines of a role. `Level` learns the ratio of one
engine's or pair's cost to the cost of an average one. Both learn ratios, because costs span orders
of magnitude. Both fade with time, so the router tries an engine again that was slow and has
received no work since.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from operator import mul
from typing import TypeVar

import numpy as np

ASSUMED_WEIGHT = 0.1
"""Weight of the assumed cost, in measurements."""

MEMORY = 50.0
"""Number of measurements after which an older one has the weight 1/e."""

TRUSTED = 3.0
"""Number of measurements from which new ones are clipped.

A clipped measurement is within a factor OUTLIER of the estimate.
"""

OUTLIER = 4.0

FIT_EVERY_S = 0.1
"""Minimum interval in seconds between fits, except for those that FEW and MOST_WAITING trigger.

A fit takes much longer than recording a measurement, so several measurements share one fit.
"""

FEW = 10.0
"""Number of measurements up to which each one triggers a fit."""

MOST_WAITING = 50
"""Number of waiting measurements that triggers a fit before the interval ends."""

LEAST_S = 1e-6

Components = tuple[float, ...]
"""Seconds of each part of a cost; assumed ones, unless stated otherwise."""

Number = TypeVar("Number", float, np.ndarray)
"""A number, or an array of numbers: one for each engine."""


class Level:
    """Factor on an expected cost: weighted geometric mean of the measured ratios.

    The weight of measurements decays with the time constant `fades_s` in seconds. Without new
    measurements, the factor returns to 1.
    """

    def __init__(self, fades_s: float) -> None:
        self._fades_s = fades_s
        self._mean = 0.0
        self._count = 0.0
        self._at = 0.0

    def fade(self, now: float) -> float:
        """Return the current weight of a measurement made at the last update."""
        return math.exp(-max(now - self._at, 0.0) / self._fades_s)

    def count(self, now: float) -> float:
        """Return the faded number of measurements."""
        return self._count * self.fade(now)

    def factor(self, now: float) -> float:
        """Return the factor; 1 without recent measurements."""
        return math.exp(self._mean * self._share(now))

    def observe(self, assumed_s: float, measured_s: float, now: float) -> float:
        """Update the factor from a measurement; return the clipped measurement in seconds."""
        count = self.count(now)
        ratio = math.log(max(measured_s, LEAST_S) / max(assumed_s, LEAST_S))
        if count >= TRUSTED:
            ratio = min(max(ratio, self._mean - math.log(OUTLIER)), self._mean + math.log(OUTLIER))
        kept = count * (1 - 1 / MEMORY)
        self._mean = (self._mean * kept + ratio) / (kept + 1)
        self._count = kept + 1
        self._at = max(now, self._at)
        return max(assumed_s, LEAST_S) * math.exp(ratio)

    @property
    def state(self) -> tuple[float, float, float]:
        """Mean logarithm of the ratios, their count at the last measurement, and its time."""
        return self._mean, self._count, self._at

    def _share(self, now: float) -> float:
        count = self.count(now)
        return count / (count + ASSUMED_WEIGHT)


class Levels:
    """`Level` of each engine, also in arrays to compute all factors at once."""

    def __init__(self, fades_s: float) -> None:
        self._fades_s = fades_s
        self._levels: dict[str, Level] = {}
        self._index: dict[str, int] = {}
        # Mean, count and time of each engine. Column 0 is for engines without measurements.
        self._values = np.zeros((3, 1))

    def factor(self, engine: str, now: float) -> float:
        """Return the factor of one engine; 1 without recent measurements."""
        level = self._levels.get(engine)
        return 1.0 if level is None else level.factor(now)

    def factors(self, engines: Iterable[str], now: float) -> np.ndarray:
        """Return the factor of each engine."""
        index = self._index
        return _factors(self._values.take([index.get(name, 0) for name in engines], axis=1), self._fades_s, now)

    def observe(self, engine: str, assumed_s: float, measured_s: float, now: float) -> None:
        """Update the level of one engine from a measurement."""
        level = self._levels.get(engine)
        if level is None:
            level = self._levels[engine] = Level(self._fades_s)
        level.observe(assumed_s, measured_s, now)
        self._store(engine, level)

    def keep_only(self, engines: AbstractSet[str]) -> None:
        """Remove all engines that are not in `engines`."""
        kept = {engine: level for engine, level in self._levels.items() if engine in engines}
        if len(kept) < len(self._levels):
            self.__init__(self._fades_s)  # type: ignore[misc]
            self._levels = kept
            for engine, level in kept.items():
                self._store(engine, level)

    def _store(self, engine: str, level: Level) -> None:
        index = self._index.setdefault(engine, len(self._index) + 1)
        if index >= self._values.shape[1]:
            self._values = np.pad(self._values, [(0, 0), (0, 2 * (index + 1 - self._values.shape[1]))])
        self._values[:, index] = level.state


class PairLevels:
    """`Level` of each (prefill, decode) pair, also in arrays to compute all factors at once."""

    def __init__(self, fades_s: float) -> None:
        self._fades_s = fades_s
        self._levels: dict[tuple[str, str], Level] = {}
        self._prefill: dict[str, int] = {}
        self._decode: dict[str, int] = {}
        # Mean, count and time of each pair. Row and column 0 are for engines without measurements.
        self._values = np.zeros((3, 1, 1))

    def factor(self, pair: tuple[str, str], now: float) -> float:
        """Return the factor of one pair; 1 without recent measurements."""
        level = self._levels.get(pair)
        return 1.0 if level is None else level.factor(now)

    def factors(self, prefill: Sequence[str], decode: Sequence[str], now: float) -> np.ndarray:
        """Return the factors of all pairs, in shape (decode engines, prefill engines)."""
        columns = [self._prefill.get(name, 0) for name in prefill]
        rows = [self._decode.get(name, 0) for name in decode]
        return _factors(self._values.take(rows, axis=1).take(columns, axis=2), self._fades_s, now)

    def observe(self, pair: tuple[str, str], assumed_s: float, measured_s: float, now: float) -> None:
        """Update the level of one pair from a measurement."""
        level = self._levels.get(pair)
        if level is None:
            level = self._levels[pair] = Level(self._fades_s)
        level.observe(assumed_s, measured_s, now)
        self._store(pair, level)

    def keep_only(self, pairs: AbstractSet[tuple[str, str]]) -> None:
        """Remove all pairs that are not in `pairs`."""
        kept = {pair: level for pair, level in self._levels.items() if pair in pairs}
        if len(kept) < len(self._levels):
            self.__init__(self._fades_s)  # type: ignore[misc]
            self._levels = kept
            for pair, level in kept.items():
                self._store(pair, level)

    def _store(self, pair: tuple[str, str], level: Level) -> None:
        column = self._prefill.setdefault(pair[0], len(self._prefill) + 1)
        row = self._decode.setdefault(pair[1], len(self._decode) + 1)
        missing = [max(0, index + 1 - size) for index, size in zip((row, column), self._values.shape[1:], strict=True)]
        if any(missing):
            self._values = np.pad(self._values, [(0, 0), *((0, 2 * more) for more in missing)])
        self._values[:, row, column] = level.state


def _factors(values: np.ndarray, fades_s: float, now: float) -> np.ndarray:
    """Return the factors of levels whose mean, count and time are the rows of `values`."""
    mean, count, at = values
    present = count * np.exp(np.minimum(at - now, 0.0) / fades_s)
    factors: np.ndarray = np.exp(mean * present / (present + ASSUMED_WEIGHT))
    return factors


class Regression:
    """Factor of each part of a cost: ridge regression of relative errors towards a common factor.

    A prediction includes all observations that are at least FIT_EVERY_S old.
    """

    RIDGE = 0.3
    """Weight of the ridge penalty, as a number of measurements."""

    def __init__(self, parts: int, fades_s: float) -> None:
        self._level = Level(fades_s)
        self._squares = np.zeros((parts, parts))
        self._products = np.zeros(parts)
        self._factors = np.ones(parts)
        self._waiting: list[tuple[float, Components, float]] = []
        """Measurements to fit: (factor on weights of earlier ones, assumed parts, measured time).

        Parts and time are divided by the assumed total times the common factor.
        """
        self._fitted_at = -math.inf
        self._common = 1.0
        """Common factor at the last measurement, towards which a fit pulls the parts' factors."""
        # Cached: one decision needs the same factors many times.
        self._cached_at: float | None = None
        self._cached: tuple[float, ...] = ()

    def count(self, now: float) -> float:
        """Return the faded number of measurements."""
        return self._level.count(now)

    def factors(self, now: float) -> tuple[float, ...]:
        """Return the factor of each part; 1 without recent measurements.

        First fits waiting measurements if the last fit is at least FIT_EVERY_S old.
        """
        if now != self._cached_at:
            if self._waiting and now - self._fitted_at >= FIT_EVERY_S:
                self.fit(now)
            count = self.count(now)
            share = count / (count + ASSUMED_WEIGHT)
            self._cached = tuple(1 + (factor - 1) * share for factor in self._factors.tolist())
            self._cached_at = now
        return self._cached

    def parts(self, assumed: tuple[float | Number, ...], now: float) -> tuple[float | Number, ...]:
        """Return the expected seconds of each part of work with the assumed parts `assumed`."""
        return tuple(map(mul, self.factors(now), assumed))

    def predict(self, assumed: tuple[float | Number, ...], now: float) -> Number:
        """Return the expected seconds of work with the assumed parts `assumed`."""
        # Not a product of matrices: equal work must have equal costs, to the last bit.
        seconds: Number = sum(map(mul, self.factors(now), assumed))
        return seconds

    def observe(self, assumed: Components, measured_s: float, now: float) -> None:
        """Record that work with the parts `assumed` took `measured_s`; ignore work of zero cost."""
        if sum(assumed) < LEAST_S:
            return
        kept = (1 - 1 / MEMORY) * self._level.fade(now)
        if self.count(now) >= TRUSTED:
            expected_s = max(self.predict(assumed, now), LEAST_S)
            measured_s = min(max(measured_s, expected_s / OUTLIER), expected_s * OUTLIER)
        believed_s = self._level.observe(sum(assumed), measured_s, now)
        common = self._common = self._level.factor(now)
        scale_s = max(sum(assumed), LEAST_S) * common
        self._waiting.append((kept, tuple(part / scale_s for part in assumed), believed_s / scale_s))
        due = now - self._fitted_at >= FIT_EVERY_S or len(self._waiting) >= MOST_WAITING
        if due or self._level.count(now) <= FEW:
            self.fit(now)
        self._cached_at = None

    @property
    def waiting(self) -> int:
        """Number of measurements that are not fitted yet."""
        return len(self._waiting)

    def fit(self, now: float) -> None:
        """Fit all waiting measurements."""
        if not self._waiting:
            return
        kept, shares, ratios = (np.array(column) for column in zip(*self._waiting, strict=True))
        # Weight of each waiting measurement after the decay by later ones. The first entry is the
        # weight of the sums of earlier fits.
        weights = np.cumprod(np.append(1.0, kept[::-1]))[::-1]
        weighted = shares.T * weights[1:]
        self._squares = self._squares * weights[0] + weighted @ shares
        self._products = self._products * weights[0] + weighted @ ratios
        self._factors = self._solve(self._common)
        self._waiting.clear()
        self._fitted_at = now

    def _solve(self, common: float) -> np.ndarray:
        """Return the factors of the best fit, none below zero.

        Negative factors are fixed at zero, and the others are fitted again.
        """
        squares, products = self._squares.copy(), self._products.copy()
        # The second term keeps the matrix regular after cost changes of many orders of magnitude.
        pull = max(self.RIDGE / common**2, 1e-9 * float(squares.trace()))
        squares.flat[:: len(products) + 1] += pull
        products += pull * common
        free = np.ones(len(products), dtype=bool)
        factors = np.linalg.solve(squares, products)
        while not (factors >= 0).all():
            free &= factors > 0
            factors = np.zeros(len(products))
            factors[free] = np.linalg.solve(squares[np.ix_(free, free)], products[free])
        return factors
