"""List the options to serve one request, with the expected cost of each."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from actors.policy.costs import HANDOVER, LOCAL, PREFILL, STEP, Costs
from actors.policy.decision import Estimate
from actors.policy.loads import EngineLoad
from configs.settings.router import RoutingSettings

IDLE = EngineLoad()


class Candidate(NamedTuple):
    """An engine that may serve the request."""

    engine: str
    calls: int  # ongoing sequences, those of other routers included
    others: int  # those of other routers; each counts like this request, or as a stream on decode
    streams: int  # streams on a decode engine
    queue_s: float  # expected seconds until this router's queued prompts are computed
    failing: bool  # options with this engine come last
    held_tokens: int  # estimated prompt tokens in its cache
    loaded_tokens: int  # estimated prompt tokens in its KV store, but not in its cache


def candidate(
    engine: str, load: EngineLoad | None, ongoing: int, held_tokens: int, loaded_tokens: int, now: float
) -> Candidate:
    load = load or IDLE
    calls = len(load.calls)
    others = ongoing - calls if ongoing > calls else 0
    streams, queue_s, failing = len(load.streams) + others, load.prompts.wait_s(now), load.failing(now)
    return Candidate(engine, calls + others, others, streams, queue_s, failing, held_tokens, loaded_tokens)


class Options:
    """All decode engines alone, and all pairs, with their expected costs in seconds.

    The order of the engines decides between equal options. Only pairs are computed in arrays: an
    array operation takes about a microsecond, as long as the arithmetic of an engine.

    ``local``  estimate of each decode engine alone
    """

    def __init__(
        self,
        prompt_tokens: int,
        answer_tokens: int,
        decode: Sequence[Candidate],
        prefill: Sequence[Candidate],
        costs: Costs,
        now: float,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.decode, self.prefill = decode, prefill
        self._levels, self._now = costs.levels, now
        self.local: list[Estimate] = []
        self._slowed_s: list[float] = []  # all streams on each decode engine, by one more stream
        self._handover_s: list[float] = []  # to each decode engine, from an average prefill engine
        step_s, stream_s = costs.rates(STEP, now)
        fixed_s, token_s, attention_s, load_s, shared_s = costs.rates(LOCAL, now)
        handover_s, move_s, slow_s = costs.rates(HANDOVER, now)
        for one in decode:
            moved, streams, loaded = prompt_tokens - one.held_tokens, one.streams, one.loaded_tokens
            new = moved - loaded
            new_s = new * (token_s + attention_s * (prompt_tokens - new / 2) + shared_s * streams)
            compute_s = (fixed_s + new_s + load_s * loaded) * self._levels.factor(one.engine, LOCAL, now)
            factor = self._levels.factor(one.engine, STEP, now)
            decoding_s = (answer_tokens - 1) * (step_s + stream_s * (streams + 1)) * factor
            slowed_s = answer_tokens * streams * stream_s * factor
            delayed_s = slowed_s + streams * compute_s
            self.local.append(
                Estimate(one.engine, None, new, loaded, 0, one.queue_s, compute_s, 0.0, decoding_s, delayed_s)
            )
            self._slowed_s.append(slowed_s)
            self._handover_s.append(handover_s + move_s * moved + slow_s * streams)
        self._prefill_s: list[tuple[float, float]] = []  # queue and computation
        fixed_s, token_s, attention_s, load_s = costs.rates(PREFILL, now)
        for one in prefill:
            new = prompt_tokens - one.held_tokens - one.loaded_tokens
            new_s = new * (token_s + attention_s * (prompt_tokens - new / 2))
            factor = self._levels.factor(PREFILL, one.engine, now)
            compute_s = (fixed_s + new_s + load_s * one.loaded_tokens) * factor
            self._prefill_s.append((one.queue_s + one.others * compute_s, compute_s))

    def pair(self, decode: int, prefill: int) -> Estimate:
        """Return the estimate of the remote option on one pair."""
        one, local = self.prefill[prefill], self.local[decode]
        queue_s, compute_s = self._prefill_s[prefill]
        factor = self._levels.factor(local.decode, one.engine, self._now)
        return Estimate(
            decode=local.decode,
            prefill=one.engine,
            uncached_tokens=self.prompt_tokens - one.held_tokens - one.loaded_tokens,
            loaded_tokens=one.loaded_tokens,
            moved_tokens=self.prompt_tokens - self.decode[decode].held_tokens,
            queue_s=queue_s,
            compute_s=compute_s,
            handover_s=self._handover_s[decode] * factor,
            decoding_s=local.decoding_s,
            interference_s=self._slowed_s[decode],
        )

    def pair_costs(self, settings: RoutingSettings) -> np.ndarray:
        """Return the `score` of all pairs, in shape (decode, prefill engines)."""
        decode, prefill = [one.engine for one in self.decode], [one.engine for one in self.prefill]
        factors = self._levels.factors(decode, prefill, self._now)
        by_decode = np.array([self._handover_s, [one.decoding_s for one in self.local], self._slowed_s])
        handover_s, decoding_s, slowed_s = by_decode[:, :, None]
        weighted_s = settings.decode_weight * decoding_s + settings.interference_weight * slowed_s
        costs: np.ndarray = np.array([sum(one) for one in self._prefill_s]) + handover_s * factors + weighted_s
        return costs


def score(settings: RoutingSettings, option: Estimate) -> float:
    """Return the weighted cost of an option, in seconds of time to first token."""
    ttft_s = option.queue_s + option.compute_s + option.handover_s
    return ttft_s + settings.decode_weight * option.decoding_s + settings.interference_weight * option.interference_s
