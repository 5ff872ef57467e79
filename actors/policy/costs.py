"""What prefills, handovers, prefills on decode and decode steps cost on each engine: assumed, then measured.

A prefill's parts are an overhead, the new tokens, and each new token's attention to what comes before it. On decode
the same work also waits for the running streams' share of each step. A handover is what the client waits for once its
prompt is computed: an overhead, the KV that was not hidden behind the computation, and the running streams' step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from actors.policy.estimates import Components, Level, Regression
from configs.settings import RoutingSettings

ATTENTION_TOKENS = 32_768.0
"""Assumed: at this context a token's attention costs as much as the rest of it."""

BUSY_STREAMS = 64.0
"""Assumed: so many streams double a decode step, and the cost of a token prefilled among them."""

ENGINE_FADES_SHARE = 0.1
"""An engine's own factor fades so much faster than its role's costs."""


class _Cost:
    """A role's costs and each member's own factor on them."""

    def __init__(self, parts: int, fades_s: float) -> None:
        self.role = Regression(parts, fades_s)
        self._members: defaultdict[object, Level] = defaultdict(lambda: Level(fades_s * ENGINE_FADES_SHARE))

    def predict(self, member: object, assumed: Components, now: float) -> float:
        return self.role.predict(assumed, now) * self.factor(member, now)

    def factor(self, member: object, now: float) -> float:
        return self._members[member].factor(now) if member in self._members else 1.0

    def observe(self, member: object, assumed: Components, measured_s: float, now: float) -> None:
        # The role learns what a usual member would have taken, or each member's own factor would count twice.
        self.role.observe(assumed, measured_s / self.factor(member, now), now)
        self._members[member].observe(self.role.predict(assumed, now), measured_s, now)

    def keep_only(self, members: set[object]) -> None:
        for gone in self._members.keys() - members:
            del self._members[gone]


class Costs:
    """Estimates for every engine and pair, all in seconds; tokens are counted after what is cached."""

    def __init__(self, settings: RoutingSettings) -> None:
        self.settings = settings
        self._prefill = _Cost(3, settings.fades_s)
        self._local = _Cost(4, settings.fades_s)
        self._handover = _Cost(3, settings.fades_s)
        self._step = _Cost(3, settings.fades_s)

    def prefill_parts(self, new_tokens: int, held_tokens: int) -> Components:
        """Of a prompt's `new_tokens` after `held_tokens`, on a prefill engine."""
        token_s = 1 / self.settings.assumed_prefill_tokens_per_s
        context_tokens = held_tokens + new_tokens / 2
        return (
            self.settings.assumed_prefill_overhead_s,
            new_tokens * token_s,
            new_tokens * token_s * context_tokens / ATTENTION_TOKENS,
        )

    def local_parts(self, new_tokens: int, held_tokens: int, streams: int, now: float) -> Components:
        """The same on a decode engine with `streams`: assumed from what prefill engines have shown."""
        usual = self._prefill.role.parts(self.prefill_parts(new_tokens, held_tokens), now)
        return (*usual, usual[1] * streams / BUSY_STREAMS)

    def handover_parts(self, moved_tokens: int, streams: int) -> Components:
        """Of a computed prompt to a decode engine with `streams`."""
        assumed = self.settings
        step_s = assumed.assumed_step_s * streams / BUSY_STREAMS
        return assumed.assumed_handover_s, moved_tokens / assumed.assumed_transfer_tokens_per_s, step_s

    def step_parts(self, streams: float, prefilled_tokens: float, now: float) -> Components:
        """Of one step of a decode engine with `streams` that also computes `prefilled_tokens` of a prompt."""
        step_s = self.settings.assumed_step_s
        # Most are asked for without: a decision for each decode engine, twice.
        token_s = self._local.role.parts(self.local_parts(1, 0, 0, now), now)[1] if prefilled_tokens else 0.0
        return step_s, step_s * streams / BUSY_STREAMS, prefilled_tokens * token_s

    def prefill_s(self, engine: str, parts: Components, now: float) -> float:
        return self._prefill.predict(engine, parts, now)

    def local_s(self, engine: str, parts: Components, now: float) -> float:
        return self._local.predict(engine, parts, now)

    def handover_s(self, pair: tuple[str, str], parts: Components, now: float) -> float:
        return self._handover.predict(pair, parts, now)

    def step_s(self, engine: str, parts: Components, now: float) -> float:
        return self._step.predict(engine, parts, now)

    def observe_prefill(self, engine: str, parts: Components, measured_s: float, now: float) -> None:
        self._prefill.observe(engine, parts, measured_s, now)

    def observe_local(self, engine: str, parts: Components, measured_s: float, now: float) -> None:
        self._local.observe(engine, parts, measured_s, now)

    def observe_handover(self, pair: tuple[str, str], parts: Components, measured_s: float, now: float) -> None:
        self._handover.observe(pair, parts, measured_s, now)

    def observe_step(self, engine: str, parts: Components, measured_s: float, now: float) -> None:
        self._step.observe(engine, parts, measured_s, now)

    def keep_only(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        """Forget what was measured of single engines that are gone."""
        prefill, decode = set(prefill), set(decode)
        self._prefill.keep_only(set(prefill))
        self._local.keep_only(set(decode))
        self._step.keep_only(set(decode))
        self._handover.keep_only({(p, d) for p in prefill for d in decode})
