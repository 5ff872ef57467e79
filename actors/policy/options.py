"""List the options to serve one request, with the expected cost of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from actors.policy.costs import Costs
from actors.policy.decision import Estimate
from actors.policy.estimates import Number
from actors.policy.loads import EngineLoad

NOTHING = EngineLoad()


@dataclass(frozen=True)
class Options:
    """Candidate replicas of one request. Their order decides between equal options.

    ``answer_tokens``                    expected number of tokens of all answers
    ``decode``, ``prefill``              ongoing sequences of each replica (`EnginePool.ongoing`)
    ``decode_held``, ``prefill_held``    estimated prompt tokens in each replica's cache
    ``decode_stored``, ``prefill_stored``  estimated prompt tokens that are not in each replica's
                                         cache but in its KV store; replicas without any are absent
    ``decode_loads``, ``prefill_loads``  work of this router on each replica
    ``identities``                       identity of each replica; empty if all are equal
    """

    prompt_tokens: int
    answer_tokens: int
    decode: Mapping[str, int]
    prefill: Mapping[str, int]
    decode_held: Mapping[str, int]
    prefill_held: Mapping[str, int]
    decode_stored: Mapping[str, int]
    prefill_stored: Mapping[str, int]
    decode_loads: Mapping[str, EngineLoad] = field(repr=False)
    prefill_loads: Mapping[str, EngineLoad] = field(repr=False)
    costs: Costs = field(repr=False)
    now: float = 0.0
    identities: Mapping[str, str] = field(default_factory=dict, repr=False)

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
        """Return the number of other streams on a decode replica."""
        return _streams(self.decode[decode], self._decode_load(decode))

    def local(self, decode: str) -> Estimate:
        """Return the estimate of the option in which `decode` serves the request alone."""
        loaded, streams = self.decode_stored.get(decode, 0), self.streams(decode)
        new = self.prompt_tokens - self.decode_held[decode] - loaded
        decoding_s, interference_s = self._decoding_s(streams, self.costs.step.factor(decode, self.now))
        compute_s = self._local_s(new, loaded, streams, self.costs.local.factor(decode, self.now))
        queue_s = self._decode_load(decode).prompts.wait_s(self.now)
        delayed_s = interference_s + streams * compute_s
        return Estimate(decode, None, new, loaded, 0, queue_s, compute_s, 0.0, decoding_s, delayed_s)

    def pair(self, decode: str, prefill: str) -> Estimate:
        """Return the estimate of the remote option on one pair of replicas."""
        moved, streams = self.prompt_tokens - self.decode_held[decode], self.streams(decode)
        loaded = self.prefill_stored.get(prefill, 0)
        new = self.prompt_tokens - self.prefill_held[prefill] - loaded
        decoding_s, interference_s = self._decoding_s(streams, self.costs.step.factor(decode, self.now))
        compute_s = self._prefill_s(new, loaded, self.costs.prefill.factor(prefill, self.now))
        load = self.prefill_loads.get(prefill, NOTHING)
        queue_s = load.prompts.wait_s(self.now) + _others(self.prefill[prefill], load) * compute_s
        parts = self.costs.handover_parts(moved, streams)
        handover_s = self.costs.handover_s((prefill, decode), parts, self.now)
        return Estimate(decode, prefill, new, loaded, moved, queue_s, compute_s, handover_s, decoding_s, interference_s)

    def local_costs(self, decode_weight: float, interference_weight: float) -> np.ndarray:
        """Return the weighted cost in seconds of each decode replica alone."""
        streams, moved = self._decode_columns
        decoding_s, interference_s = self._decoding_columns
        loaded = _stored(self.decode_stored, self.decode)
        compute_s = self._local_s(moved - loaded, loaded, streams, self.costs.local.factors(self.decode, self.now))
        queue_s = np.array([load.prompts.wait_s(self.now) for load in self.decode_load_list])
        delayed_s = interference_s + streams * compute_s
        costs: np.ndarray = queue_s + compute_s + decode_weight * decoding_s + interference_weight * delayed_s
        return costs

    def pair_costs(self, decode_weight: float, interference_weight: float) -> np.ndarray:
        """Return the weighted costs of all pairs in seconds: shape (decode, prefill replicas)."""
        streams, moved = self._decode_columns
        decoding_s, interference_s = self._decoding_columns
        by_decode = decode_weight * decoding_s + interference_weight * interference_s
        loaded = _stored(self.prefill_stored, self.prefill)
        held = np.array([self.prefill_held[prefill] for prefill in self.prefill], float)
        new = self.prompt_tokens - held - loaded
        compute_s = self._prefill_s(new, loaded, self.costs.prefill.factors(self.prefill, self.now))
        loads = self.prefill_load_list
        others = np.array(list(map(_others, self.prefill.values(), loads)), float)
        queue_s = np.array([load.prompts.wait_s(self.now) for load in loads]) + others * compute_s
        parts = self.costs.handover_parts(moved, streams)
        handovers_s = self.costs.handovers_s(list(self.prefill), list(self.decode), parts, self.now)
        costs: np.ndarray = (queue_s + compute_s)[None, :] + handovers_s + by_decode[:, None]
        return costs

    @cached_property
    def mismatches(self) -> np.ndarray | None:
        """Pairs with different identities: bool, shape (decode, prefill replicas); None: none.

        Such a pair cannot exchange KV.
        """
        if not self.identities:  # the usual case
            return None
        # An engine without an entry has just stopped.
        decode = np.array([self.identities.get(name, "") for name in self.decode])
        prefill = np.array([self.identities.get(name, "") for name in self.prefill])
        differ: np.ndarray = decode[:, None] != prefill[None, :]
        return differ

    @cached_property
    def decode_load_list(self) -> list[EngineLoad]:
        """Work of this router on each decode replica."""
        return [self._decode_load(decode) for decode in self.decode]

    @cached_property
    def prefill_load_list(self) -> list[EngineLoad]:
        """Work of this router on each prefill replica."""
        return [self.prefill_loads.get(prefill, NOTHING) for prefill in self.prefill]

    @cached_property
    def _decode_columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Other streams on each decode replica, and prompt tokens that it has not cached."""
        streams = np.array(list(map(_streams, self.decode.values(), self.decode_load_list)), float)
        held = np.array([self.decode_held[decode] for decode in self.decode], float)
        return streams, self.prompt_tokens - held

    @cached_property
    def _decoding_columns(self) -> tuple[np.ndarray, np.ndarray]:
        return self._decoding_s(self._decode_columns[0], self.costs.step.factors(self.decode, self.now))

    # The arguments are those of one replica, or arrays with those of all.

    def _decoding_s(self, streams: Number, factor: Number) -> tuple[Number, Number]:
        """Return the expected seconds of the answer after its first token, and of all delays.

        The second is the delay of all other streams on the decode replica together.
        """
        step_s = self.costs.step.role.predict(self.costs.step_parts(streams + 1, 0.0, self.now), self.now) * factor
        one_more_s = self.costs.one_more_stream_s(self.now) * factor
        return (self.answer_tokens - 1) * step_s, self.answer_tokens * streams * one_more_s

    def _local_s(self, new: Number, loaded: Number, streams: Number, factor: Number) -> Number:
        """Return the expected seconds in which a decode replica loads and computes the prompt."""
        parts = self.costs.local_parts(new, self.prompt_tokens - new - loaded, loaded, streams, self.now)
        compute_s: Number = self.costs.local.role.predict(parts, self.now) * factor
        return compute_s

    def _prefill_s(self, new: Number, loaded: Number, factor: Number) -> Number:
        """Return the expected seconds in which a prefill replica loads and computes the prompt."""
        parts = self.costs.prefill_parts(new, self.prompt_tokens - new - loaded, loaded)
        compute_s: Number = self.costs.prefill.role.predict(parts, self.now) * factor
        return compute_s

    def _decode_load(self, decode: str) -> EngineLoad:
        return self.decode_loads.get(decode, NOTHING)


def _stored(stored: Mapping[str, int], replicas: Mapping[str, int]) -> Any:
    """Return the tokens to load of each replica, as an array; 0 if `stored` is empty."""
    if not stored:  # the usual case, and a decision has little time
        return 0
    return np.array([stored.get(replica, 0) for replica in replicas], float)


def _streams(ongoing: int, load: EngineLoad) -> int:
    """Return the number of other streams on a decode replica.

    Sequences beyond this router's requests count as streams: only their number is known.
    """
    return len(load.streams) + max(ongoing - len(load.calls), 0)


def _others(ongoing: int, load: EngineLoad) -> int:
    """Return the number of sequences of other routers on a prefill replica.

    Only their number is known, so each counts like this request.
    """
    return max(ongoing - len(load.calls), 0)
