"""List the options to serve one request, with the expected cost of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from actors.policy.costs import Costs
from actors.policy.decision import Estimate
from actors.policy.loads import EngineLoad

NOTHING = EngineLoad()


@dataclass(frozen=True)
class Options:
    """Candidate replicas of one request. Their order decides between equal options.

    ``answer_tokens``                    expected number of tokens of all answers
    ``decode``, ``prefill``              ongoing sequences of each replica (`EnginePool.ongoing`)
    ``decode_held``, ``prefill_held``    estimated prompt tokens in each replica's cache
    ``decode_loads``, ``prefill_loads``  work of this router on each replica
    """

    prompt_tokens: int
    answer_tokens: int
    decode: Mapping[str, int]
    prefill: Mapping[str, int]
    decode_held: Mapping[str, int]
    prefill_held: Mapping[str, int]
    decode_loads: Mapping[str, EngineLoad] = field(repr=False)
    prefill_loads: Mapping[str, EngineLoad] = field(repr=False)
    costs: Costs = field(repr=False)
    now: float = 0.0

    def ongoing_decode(self, decode: str) -> int:
        """Return the number of ongoing sequences of a decode replica.

        At least the number of this router's requests on it.
        """
        return max(self.decode[decode], len(self._decode_load(decode).calls))

    def ongoing_prefill(self, prefill: str) -> int:
        """Return the number of ongoing sequences of a prefill replica; 0 for an unknown id.

        At least the number of this router's requests on it.
        """
        return max(self.prefill.get(prefill, 0), len(self.prefill_loads.get(prefill, NOTHING).calls))

    def streams(self, decode: str) -> int:
        """Return the number of other streams on a replica.

        Sequences beyond this router's requests count as streams: only their number is known.
        """
        load = self.decode_loads.get(decode)
        ongoing = self.decode[decode]
        return ongoing if load is None else len(load.streams) + max(ongoing - len(load.calls), 0)

    def uncached(self, decode: str) -> int:
        return self.prompt_tokens - self.decode_held[decode]

    @cached_property
    def local(self) -> list[Estimate]:
        """Options in which one decode replica serves the request alone."""
        return [self._local(decode) for decode in self.decode]

    def pair(self, decode: str, prefill: str) -> Estimate:
        """Return the estimate of the remote option on one pair of replicas."""
        moved, parts, decoding_s, interference_s = self._decodes[decode]
        new, queue_s, compute_s = self._prefills[prefill]
        handover_s = self.costs.handover_s((prefill, decode), parts, self.now)
        return Estimate(decode, prefill, new, moved, queue_s, compute_s, handover_s, decoding_s, interference_s)

    def pair_costs(self, decode_weight: float, interference_weight: float) -> np.ndarray:
        """Return the weighted costs of all pairs in seconds: shape (decode, prefill replicas)."""
        decodes = self._decodes.values()
        parts = [parts for _, parts, _, _ in decodes]
        by_decode = np.array([decode_weight * after + interference_weight * delay for _, _, after, delay in decodes])
        by_prefill = np.array([queue_s + compute_s for _, queue_s, compute_s in self._prefills.values()])
        handovers_s = self.costs.handovers_s(list(self.prefill), list(self.decode), parts, self.now)
        costs: np.ndarray = by_prefill[None, :] + handovers_s + by_decode[:, None]
        return costs

    @cached_property
    def _prefills(self) -> dict[str, tuple[int, float, float]]:
        return {prefill: self._prefill(prefill) for prefill in self.prefill}

    @cached_property
    def _decodes(self) -> dict[str, tuple[int, tuple[float, ...], float, float]]:
        return {decode: self._decode(decode) for decode in self.decode}

    @cached_property
    def _decoding(self) -> dict[str, tuple[float, float]]:
        """Expected times on each decode replica, in seconds.

        Each value is (answer after its first token, delay of all other streams together).
        """
        return {decode: self._decoding_on(decode) for decode in self.decode}

    def _local(self, decode: str) -> Estimate:
        new, held, streams = self.uncached(decode), self.decode_held[decode], self.streams(decode)
        parts = self.costs.local_parts(new, held, streams, self.now)
        compute_s = self.costs.local.predict_s(decode, parts, self.now)
        decoding_s, interference_s = self._decoding[decode]
        queue_s = self._decode_load(decode).prompts.wait_s(self.now)
        delayed_s = interference_s + streams * compute_s
        return Estimate(decode, None, new, 0, queue_s, compute_s, 0.0, decoding_s, delayed_s)

    def _prefill(self, prefill: str) -> tuple[int, float, float]:
        held = self.prefill_held[prefill]
        new = self.prompt_tokens - held
        compute_s = self.costs.prefill.predict_s(prefill, self.costs.prefill_parts(new, held), self.now)
        load = self.prefill_loads.get(prefill, NOTHING)
        others = max(self.prefill[prefill] - len(load.calls), 0)
        # Only the number of other routers' sequences is known, so each counts like this request.
        return new, load.prompts.wait_s(self.now) + others * compute_s, compute_s

    def _decode(self, decode: str) -> tuple[int, tuple[float, ...], float, float]:
        moved = self.uncached(decode)
        return moved, self.costs.handover_parts(moved, self.streams(decode)), *self._decoding[decode]

    def _decoding_on(self, decode: str) -> tuple[float, float]:
        streams, costs = self.streams(decode), self.costs
        with_it = costs.step.predict_s(decode, costs.step_parts(streams + 1, 0.0, self.now), self.now)
        without = costs.step.predict_s(decode, costs.step_parts(streams, 0.0, self.now), self.now)
        return (self.answer_tokens - 1) * with_it, self.answer_tokens * streams * (with_it - without)

    def _decode_load(self, decode: str) -> EngineLoad:
        return self.decode_loads.get(decode, NOTHING)
