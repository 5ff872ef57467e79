"""Costs of prefill, handover, prefill on decode, and decode steps: assumed first, then measured.

A prefill costs an overhead, its new tokens, their attention to earlier tokens, and the load of
stored tokens. A prefill on decode also waits for the running streams' share of each step. A
handover is the wait after the prompt is computed. It has an overhead, the part of the transfer that
did not overlap with the computation, and one step of the running streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from actors.policy.estimates import Components, Levels, Number, PairLevels, Regression
from configs.settings.router import RoutingSettings

ATTENTION_TOKENS = 32_768.0
"""Assumed context length at which attention costs as much as the rest of a token's computation."""

BUSY_STREAMS = 64.0
"""Assumed number of running streams that doubles the cost of a decode step.

It also doubles the cost of a prompt token computed in such a step.
"""

ENGINE_FADES_SHARE = 0.1
"""Time constant of the decay of an engine's or pair's factor, as a fraction of `fades_s`."""


class Cost:
    """One cost of a role, and a factor for each engine of the role."""

    def __init__(self, parts: int, fades_s: float) -> None:
        self.role = Regression(parts, fades_s)
        self._members = Levels(fades_s * ENGINE_FADES_SHARE)

    def predict_s(self, member: str, assumed: Components, now: float) -> float:
        return self.role.predict(assumed, now) * self.factor(member, now)

    def factor(self, member: str, now: float) -> float:
        return self._members.factor(member, now)

    def factors(self, members: Iterable[str], now: float) -> np.ndarray:
        """Return the factor of each member."""
        return self._members.factors(members, now)

    def observe(self, member: str, assumed: Components, measured_s: float, now: float) -> None:
        # The role learns the cost of an average member; otherwise a member's factor would count
        # twice.
        self.role.observe(assumed, measured_s / self.factor(member, now), now)
        self._members.observe(member, self.role.predict(assumed, now), measured_s, now)

    def keep_only(self, members: AbstractSet[str]) -> None:
        self._members.keep_only(members)


class Costs:
    """Cost estimates for each engine and pair, in seconds.

    ``prefill``  costs of a prompt on a prefill engine
    ``local``    costs of a prompt on a decode engine
    ``step``     costs of a decode step

    All token counts but `held_tokens` exclude cached tokens, and those of computed tokens also
    exclude loaded ones. The functions that return cost parts take numbers, or arrays with one
    number for each engine.
    """

    def __init__(self, settings: RoutingSettings) -> None:
        self.settings = settings
        self.prefill = Cost(4, settings.fades_s)
        self.local = Cost(5, settings.fades_s)
        self.step = Cost(3, settings.fades_s)
        self._handover = Regression(3, settings.fades_s)
        self._pairs = PairLevels(settings.fades_s * ENGINE_FADES_SHARE)

    def prefill_parts(
        self, new_tokens: Number, held_tokens: Number, loaded_tokens: Number
    ) -> tuple[float | Number, ...]:
        """Return the assumed cost parts of a prompt.

        ``new_tokens``     tokens to compute, after the others
        ``held_tokens``    cached tokens
        ``loaded_tokens``  tokens to load from the KV store
        """
        new_s = new_tokens * (1 / self.settings.assumed_prefill_tokens_per_s)
        context_tokens = held_tokens + loaded_tokens + new_tokens / 2
        return (
            self.settings.assumed_prefill_overhead_s,
            new_s,
            new_s * context_tokens / ATTENTION_TOKENS,
            loaded_tokens / self.settings.assumed_load_tokens_per_s,
        )

    def local_parts(
        self, new_tokens: Number, held_tokens: Number, loaded_tokens: Number, streams: Number, now: float
    ) -> tuple[float | Number, ...]:
        """Return the cost parts of a prefill on a decode engine with ``streams`` running streams.

        The parts are derived from the costs of prefill engines, measured or still assumed.
        """
        assumed = self.prefill_parts(new_tokens, held_tokens, loaded_tokens)
        fixed, linear, attention, load = self.prefill.role.parts(assumed, now)
        return (fixed, linear, attention, load, linear * streams / BUSY_STREAMS)

    def handover_parts(self, moved_tokens: Number, streams: Number) -> tuple[float | Number, ...]:
        """Return the cost parts of the handover to a decode engine with ``streams`` streams."""
        assumed = self.settings
        step_s = assumed.assumed_step_s * streams / BUSY_STREAMS
        return assumed.assumed_handover_s, moved_tokens / assumed.assumed_transfer_tokens_per_s, step_s

    def step_parts(self, streams: Number, prefilled_tokens: float, now: float) -> tuple[float | Number, ...]:
        """Return the cost parts of a decode step.

        ``streams``           mean number of running streams
        ``prefilled_tokens``  mean number of prompt tokens that a step computes
        """
        step_s = self.settings.assumed_step_s
        # Fast path: decisions pass no prefilled tokens.
        token_s = self.local.role.parts(self.local_parts(1, 0, 0, 0, now), now)[1] if prefilled_tokens else 0.0
        return step_s, step_s * streams / BUSY_STREAMS, prefilled_tokens * token_s

    def one_more_stream_s(self, now: float) -> float:
        """Return the seconds that one more running stream adds to a step of an average engine."""
        return self.step.role.predict((0.0, self.settings.assumed_step_s / BUSY_STREAMS, 0.0), now)

    def handover_s(self, pair: tuple[str, str], parts: Components, now: float) -> float:
        return self._handover.predict(parts, now) * self._pairs.factor(pair, now)

    def handovers_s(
        self, prefill: Sequence[str], decode: Sequence[str], parts: tuple[float | np.ndarray, ...], now: float
    ) -> np.ndarray:
        """Return the seconds of all handovers, in shape (decode engines, prefill engines).

        ``parts``  cost parts of the handovers to the decode engines
        """
        usual = self._handover.predict(parts, now)
        handovers_s: np.ndarray = usual[:, None] * self._pairs.factors(prefill, decode, now)
        return handovers_s

    def observe_handover(self, pair: tuple[str, str], parts: Components, measured_s: float, now: float) -> None:
        # As in `Cost.observe`: `_handover` learns the cost of an average pair.
        self._handover.observe(parts, measured_s / self._pairs.factor(pair, now), now)
        self._pairs.observe(pair, self._handover.predict(parts, now), measured_s, now)

    def keep_only(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        """Remove the factors of all engines but these, and of pairs with other engines."""
        prefill, decode = set(prefill), set(decode)
        self.prefill.keep_only(set(prefill))
        self.local.keep_only(set(decode))
        self.step.keep_only(set(decode))
        self._pairs.keep_only({(p, d) for p in prefill for d in decode})
