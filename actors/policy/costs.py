"""Costs of prompts, handovers and decode steps: assumed first, then measured.

A cost is a sum of quantities, each times a rate in seconds.
"""

from collections.abc import Set as AbstractSet
from operator import mul

from actors.policy.estimates import Components, Levels, Regression
from configs.settings.router import RoutingSettings

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
