"""Costs of prefill, handover, prefill on decode, and decode steps: assumed first, then measured.

A cost is the sum of its quantities, each times a rate in seconds. Quantities and seconds are
numbers, or arrays with one number for each engine.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from operator import mul

from actors.policy.estimates import Components, Levels, Number, Regression, total
from configs.settings.router import RoutingSettings

ATTENTION_TOKENS = 32_768.0
"""Assumed context length at which attention costs as much as the rest of a token's computation."""

BUSY_STREAMS = 64.0
"""Assumed number of running streams that doubles the cost of a decode step.

It also doubles the cost of a prompt token computed in such a step.
"""

ENGINE_FADES_SHARE = 0.1
"""Time constant of the decay of an engine's or pair's factor, as a fraction of `fades_s`."""

PREFILL = "(prefill)"
"""A prompt on a prefill engine.

Its overhead, new tokens, their attention to earlier ones, and tokens loaded from the KV store.
"""

LOCAL = "(local)"
"""A prompt on a decode engine: as PREFILL, and the running streams' share of each step."""

HANDOVER = "(handover)"
"""The wait after a computed prompt.

An overhead, the tokens that are not moved yet, and one step of the running streams.
"""

STEP = "(step)"
"""A decode step: its overhead, its streams, and the prompt tokens that it computes."""

PARTS = {PREFILL: 4, LOCAL: 5, HANDOVER: 3, STEP: 3}


class Costs:
    """Cost estimates for each engine and pair, in seconds.

    ``levels``  factors of engines and pairs. Rows are decode engines and PREFILL, columns are
                prefill engines, LOCAL and STEP; no engine has these names
    """

    def __init__(self, settings: RoutingSettings) -> None:
        self.levels = Levels(settings.fades_s * ENGINE_FADES_SHARE)
        self._roles = {cost: Regression(parts, settings.fades_s) for cost, parts in PARTS.items()}
        token_s, step_s = 1 / settings.assumed_prefill_tokens_per_s, settings.assumed_step_s
        load_s, move_s = 1 / settings.assumed_load_tokens_per_s, 1 / settings.assumed_transfer_tokens_per_s
        self._assumed = {
            PREFILL: (settings.assumed_prefill_overhead_s, token_s, token_s / ATTENTION_TOKENS, load_s),
            HANDOVER: (settings.assumed_handover_s, move_s, step_s / BUSY_STREAMS),
            STEP: (step_s, step_s / BUSY_STREAMS),
        }

    def assumed(self, cost: str, now: float) -> Components:
        """Return the assumed rates of a cost.

        Those of prompts on decode are the expected ones of prompts on prefill, measured or not. The
        last rate of STEP is left out: decisions assume no prompts in a step.
        """
        if cost == LOCAL:
            prefill = self.rates(PREFILL, now)
            return *prefill, prefill[1] / BUSY_STREAMS
        return self._assumed[cost]

    def rates(self, cost: str, now: float) -> Components:
        """Return the expected rates of a cost on an average engine or pair."""
        return tuple(map(mul, self._roles[cost].factors(now), self.assumed(cost, now)))

    def parts(self, cost: str, quantities: Components, now: float) -> Components:
        """Return the assumed seconds of each part of a cost."""
        assumed = self.assumed(cost, now)
        if cost == STEP:
            assumed += (self.rates(LOCAL, now)[1] if quantities[2] else 0.0,)
        return tuple(map(mul, assumed, quantities))

    def expect_s(self, cost: str, decode: str | None, prefill: str | None, parts: Components, now: float) -> float:
        """Return the expected seconds of a cost with these assumed parts, on an engine or pair.

        ``decode``, ``prefill``  the engine or pair; None for the other role
        """
        factor = self.levels.factor(decode or PREFILL, prefill or cost, now)
        return self._roles[cost].predict(parts, now) * factor

    def observe(
        self, cost: str, decode: str | None, prefill: str | None, parts: Components, measured_s: float, now: float
    ) -> None:
        """Learn a cost from a measurement; `parts` are its assumed seconds."""
        role, member = self._roles[cost], (decode or PREFILL, prefill or cost)
        # The role learns the cost of an average engine; otherwise the factor would count twice.
        role.observe(parts, measured_s / self.levels.factor(*member, now), now)
        self.levels.observe(*member, role.predict(parts, now), measured_s, now)

    def keep_only(self, prefill: AbstractSet[str], decode: AbstractSet[str]) -> None:
        """Remove the factors of all engines but these, and of pairs with other engines."""
        self.levels.keep_only({*decode, PREFILL}, {*prefill, LOCAL, STEP})


def prompt_quantities(
    new_tokens: Number, held_tokens: Number, loaded_tokens: Number
) -> tuple[float | Number, Number, Number, Number]:
    """Return the quantities of PREFILL.

    ``new_tokens``     tokens to compute, after the others
    ``held_tokens``    cached tokens
    ``loaded_tokens``  tokens to load from the KV store
    """
    return 1.0, new_tokens, new_tokens * (held_tokens + loaded_tokens + new_tokens / 2), loaded_tokens
