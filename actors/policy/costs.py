"""Costs of prompts, handovers and decode steps: assumed first, then learnt from measurements.

A cost is a sum of quantities, each times a rate in seconds. Measurements are factors on assumed
costs, which span orders of magnitude. They fade, so that an engine that was slow is tried again.
Outliers are clipped.
"""

import math
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from operator import mul

import numpy as np

from configs.settings.router import RoutingSettings

ASSUMED_WEIGHT = 0.1
"""Weight of the assumed cost, in measurements."""

MEMORY = 50.0
"""Number of measurements after which an older one has the weight 1/e."""

TRUSTED = 3.0
"""Number of measurements from which new ones are clipped: to a factor OUTLIER of the estimate."""

OUTLIER = 4.0

FIT_EVERY_S = 0.1
"""Minimum interval between fits, as a fit takes much longer than recording a measurement."""

FEW = 10.0
"""Number of measurements up to which each one is fitted at once."""

MOST_WAITING = 50
"""Number of waiting measurements that are fitted before the interval ends."""

LEAST_S = 1e-6

Components = tuple[float, ...]  # of each part of a cost: assumed seconds, rates or quantities


class Level:
    """Factor on an expected cost: weighted geometric mean of the measured ratios.

    The weight of measurements decays with the time constant `fades_s`, and the factor returns to 1.
    """

    def __init__(self, fades_s: float) -> None:
        self._fades_s = fades_s
        # Mean logarithm of the ratios, their count at the last measurement, and its time.
        self.state = 0.0, 0.0, 0.0

    def fade(self, now: float) -> float:
        """Return the current weight of a measurement made at the last update."""
        return math.exp(-max(now - self.state[2], 0.0) / self._fades_s)

    def count(self, now: float) -> float:
        return self.state[1] * self.fade(now)

    def share(self, now: float) -> float:
        count = self.count(now)
        return count / (count + ASSUMED_WEIGHT)

    def factor(self, now: float) -> float:
        return math.exp(self.state[0] * self.share(now))

    def observe(self, assumed_s: float, measured_s: float, now: float) -> float:
        """Update the factor from a measurement; return the clipped measurement in seconds."""
        mean, _, at = self.state
        count = self.count(now)
        ratio = math.log(max(measured_s, LEAST_S) / max(assumed_s, LEAST_S))
        if count >= TRUSTED:
            ratio = min(max(ratio, mean - math.log(OUTLIER)), mean + math.log(OUTLIER))
        kept = count * (1 - 1 / MEMORY)
        self.state = (mean * kept + ratio) / (kept + 1), kept + 1, max(now, at)
        return max(assumed_s, LEAST_S) * math.exp(ratio)


class Levels:
    """A `Level` for each pair of a row and a column, also in an array to compute many at once."""

    def __init__(self, fades_s: float) -> None:
        self._fades_s = fades_s
        self._levels: dict[tuple[str, str], Level] = {}
        self._rows: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        # Names without measurements share row and column 0.
        self._states = np.zeros((3, 1, 1))

    def factor(self, row: str, column: str, now: float) -> float:
        level = self._levels.get((row, column))
        return 1.0 if level is None else level.factor(now)

    def factors(self, rows: Iterable[str], columns: Iterable[str], now: float) -> np.ndarray:
        """Return the factors of all pairs, in shape (rows, columns)."""
        states = self._states.take([self._rows.get(name, 0) for name in rows], axis=1)
        mean, count, at = states.take([self._columns.get(name, 0) for name in columns], axis=2)
        present = count * np.exp(np.minimum(at - now, 0.0) / self._fades_s)
        factors: np.ndarray = np.exp(mean * present / (present + ASSUMED_WEIGHT))
        return factors

    def observe(self, row: str, column: str, assumed_s: float, measured_s: float, now: float) -> None:
        level = self._levels.get((row, column))
        if level is None:
            level = self._levels[row, column] = Level(self._fades_s)
        level.observe(assumed_s, measured_s, now)
        self._store(row, column, level)

    def keep_only(self, rows: AbstractSet[str], columns: AbstractSet[str]) -> None:
        kept = {place: level for place, level in self._levels.items() if place[0] in rows and place[1] in columns}
        if len(kept) < len(self._levels):
            self.__init__(self._fades_s)  # type: ignore[misc]
            self._levels = kept
            for place, level in kept.items():
                self._store(*place, level)

    def _store(self, row: str, column: str, level: Level) -> None:
        place = (
            self._rows.setdefault(row, len(self._rows) + 1),
            self._columns.setdefault(column, len(self._columns) + 1),
        )
        missing = [max(0, index + 1 - size) for index, size in zip(place, self._states.shape[1:], strict=True)]
        if any(missing):
            self._states = np.pad(self._states, [(0, 0), *((0, 2 * more) for more in missing)])
        self._states[:, *place] = level.state


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
        self._factors = [1.0] * parts
        # Factor on weights of earlier measurements, assumed parts and measured time. Parts and time
        # are divided by the assumed total times the common factor.
        self._waiting: list[tuple[float, Components, float]] = []
        self._fitted_at = -math.inf
        self._known: tuple[float, Components] | None = None  # time and result of the last `factors`
        self._common = 1.0  # at the last measurement; a fit pulls the parts' factors towards it

    def factors(self, now: float) -> Components:
        """Return the factor of each part, after a fit if the last one is FIT_EVERY_S old."""
        if self._waiting and now - self._fitted_at >= FIT_EVERY_S:
            self.fit(now)
        if self._known is None or self._known[0] != now:
            share = self._level.share(now)
            self._known = now, tuple([1 + (factor - 1) * share for factor in self._factors])
        return self._known[1]

    def predict(self, assumed: Components, now: float) -> float:
        """Return the expected seconds of work with the assumed parts `assumed`."""
        # Not a product of matrices: equal work must have equal costs, to the last bit.
        return sum(map(mul, self.factors(now), assumed), 0.0)

    def observe(self, assumed: Components, measured_s: float, now: float) -> None:
        """Record that work with the parts `assumed` took `measured_s`; ignore work of zero cost."""
        if sum(assumed) < LEAST_S:
            return
        kept = (1 - 1 / MEMORY) * self._level.fade(now)
        if self._level.count(now) >= TRUSTED:
            expected_s = max(self.predict(assumed, now), LEAST_S)
            measured_s = min(max(measured_s, expected_s / OUTLIER), expected_s * OUTLIER)
        self._known = None
        believed_s = self._level.observe(sum(assumed), measured_s, now)
        common = self._common = self._level.factor(now)
        scale_s = max(sum(assumed), LEAST_S) * common
        self._waiting.append((kept, tuple(part / scale_s for part in assumed), believed_s / scale_s))
        due = now - self._fitted_at >= FIT_EVERY_S or len(self._waiting) >= MOST_WAITING
        if due or self._level.count(now) <= FEW:
            self.fit(now)

    def fit(self, now: float) -> None:
        if not self._waiting:
            return
        kept, shares, ratios = (np.array(column) for column in zip(*self._waiting, strict=True))
        # Weight of each waiting measurement after the decay by later ones. The first entry is the
        # weight of the sums of earlier fits.
        weights = np.cumprod(np.append(1.0, kept[::-1]))[::-1]
        weighted = shares.T * weights[1:]
        self._squares = self._squares * weights[0] + weighted @ shares
        self._products = self._products * weights[0] + weighted @ ratios
        self._factors, self._known = self._solve(self._common).tolist(), None
        self._waiting.clear()
        self._fitted_at = now

    def _solve(self, common: float) -> np.ndarray:
        """Return the best fit; negative factors are fixed at zero and the others fitted again."""
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


ATTENTION_TOKENS = 32_768.0
"""Assumed context length at which attention costs as much as the rest of a token's computation."""

BUSY_STREAMS = 64.0
"""Assumed number of running streams that doubles the cost of a decode step.

It also doubles the cost of a prompt token computed in such a step.
"""

ENGINE_FADES_SHARE = 0.1
"""Time constant of the decay of an engine's or pair's factor, as a fraction of `fades_s`."""

# The costs, by name, with their quantities.
PREFILL = "(prefill)"  # 1, new tokens, these times their mean context, tokens loaded from a KV store
LOCAL = "(local)"  # a prompt on a decode engine: those of PREFILL, new tokens times streams
HANDOVER = "(handover)"  # the wait after a computed prompt: 1, moved tokens, streams
STEP = "(step)"  # 1, streams, prompt tokens that a decode step computes

_QUANTITIES = {PREFILL: 4, LOCAL: 5, HANDOVER: 3, STEP: 3}


class Costs:
    """Cost estimates for each engine and pair, in seconds."""

    def __init__(self, settings: RoutingSettings) -> None:
        # Factors: a row for each decode engine and PREFILL, a column for each prefill engine, LOCAL
        # and STEP; no engine has these names.
        self.levels = Levels(settings.fades_s * ENGINE_FADES_SHARE)
        self._roles = {cost: Regression(count, settings.fades_s) for cost, count in _QUANTITIES.items()}
        token_s, step_s = 1 / settings.assumed_prefill_tokens_per_s, settings.assumed_step_s
        load_s, move_s = 1 / settings.assumed_load_tokens_per_s, 1 / settings.assumed_transfer_tokens_per_s
        self._assumed: dict[str, Components] = {
            PREFILL: (settings.assumed_prefill_overhead_s, token_s, token_s / ATTENTION_TOKENS, load_s),
            HANDOVER: (settings.assumed_handover_s, move_s, step_s / BUSY_STREAMS),
            STEP: (step_s, step_s / BUSY_STREAMS),
        }

    def _assumed_rates(self, cost: str, now: float) -> Components:
        if cost == LOCAL:  # derived from the costs of prefill engines, measured or not
            prefill = self.rates(PREFILL, now)
            return *prefill, prefill[1] / BUSY_STREAMS
        return self._assumed[cost]

    def rates(self, cost: str, now: float) -> Components:
        """Return the expected rates of a cost on an average engine or pair.

        Those of STEP are without that of prompt tokens: decisions expect steps without any.
        """
        return tuple(map(mul, self._roles[cost].factors(now), self._assumed_rates(cost, now)))

    def parts(self, cost: str, quantities: Components, now: float) -> Components:
        """Return the assumed seconds of each part of a cost."""
        rates = self._assumed_rates(cost, now)
        if cost == STEP:
            rates += (self.rates(LOCAL, now)[1] if quantities[2] else 0.0,)
        return tuple(map(mul, rates, quantities))

    def expect_s(self, cost: str, decode: str | None, prefill: str | None, parts: Components, now: float) -> float:
        """Return the expected seconds of a cost with the assumed parts `parts`.

        ``decode``, ``prefill``  the engine or pair; None for the other role
        """
        return self._roles[cost].predict(parts, now) * self.levels.factor(decode or PREFILL, prefill or cost, now)

    def observe(
        self, cost: str, decode: str | None, prefill: str | None, parts: Components, measured_s: float, now: float
    ) -> None:
        """Learn from a measurement of a cost with the assumed parts `parts`."""
        role, level = self._roles[cost], (decode or PREFILL, prefill or cost)
        # The role learns the cost of an average engine; otherwise the factor would count twice.
        role.observe(parts, measured_s / self.levels.factor(*level, now), now)
        self.levels.observe(*level, role.predict(parts, now), measured_s, now)

    def keep_only(self, prefill: AbstractSet[str], decode: AbstractSet[str]) -> None:
        self.levels.keep_only({*decode, PREFILL}, {*prefill, LOCAL, STEP})


def prompt_quantities(new_tokens: int, held_tokens: int, loaded_tokens: int) -> Components:
    """Return the quantities of PREFILL: for tokens to compute, cached ones, and stored ones."""
    return 1.0, new_tokens, new_tokens * (held_tokens + loaded_tokens + new_tokens / 2), loaded_tokens
