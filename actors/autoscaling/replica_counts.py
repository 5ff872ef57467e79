"""Compute the number of replicas of each role from the load of each running replica. Pure.

A need is computed from the load itself, not as a correction of the number of replicas, so replicas
that are still starting do not change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite

from configs.settings.scaling import ScalingSettings

_TINY = 1e-9  # rounding errors of divisions add no replica


@dataclass(frozen=True)
class PrefillLoad:
    """Load of one prefill replica over the last seconds; 0 until measured."""

    queued_tokens: float = 0.0  # of prompts without a first token
    tokens_per_s: float = 0.0  # of finished prompts, cached tokens included
    tokens_per_busy_s: float = 0.0  # in the time in which it computed prompts
    prompt_tokens: float = 0.0  # mean of a prompt


@dataclass(frozen=True)
class DecodeLoad:
    """Load of one decode replica over the last seconds; 0 until measured."""

    kv_use: float = 0.0  # fraction of the KV cache in use
    running: float = 0.0  # requests, over all data-parallel ranks
    waiting: float = 0.0  # requests that vLLM's scheduler has not deferred (`num_waiting_reqs`)
    tpot_s: float = 0.0  # mean time between two tokens of a sequence
    decoding: float = 0.0  # mean number of decoding sequences; idle time counts as 0


@dataclass(frozen=True)
class Bounds:
    """Lowest, highest and last requested number of replicas of a role."""

    lowest: int
    highest: int
    current: int

    def clip(self, engines: float) -> int:
        return int(min(max(engines, self.lowest, 1), self.highest))


def prefill_need(loads: Sequence[PrefillLoad], queued_requests: float, settings: ScalingSettings) -> float | None:
    """Return the number of prefill replicas needed, not rounded; None until a rate is measured.

    Each of the ``queued_requests`` in routers counts as a prompt of mean length.
    """
    rates = [load.tokens_per_busy_s for load in loads if load.tokens_per_busy_s > 0]
    if not rates:
        return None
    lengths = [load.prompt_tokens for load in loads if load.prompt_tokens > 0]
    mean_length = sum(lengths) / len(lengths) if lengths else 0.0
    queued = sum(load.queued_tokens for load in loads) + queued_requests * mean_length
    wanted_tokens_per_s = sum(load.tokens_per_s for load in loads) + queued / settings.catch_up_s
    return wanted_tokens_per_s / (sum(rates) / len(rates) * settings.prefill_busy)


def decode_need(loads: Sequence[DecodeLoad], queued_requests: float, settings: ScalingSettings) -> float | None:
    """Return the number of decode replicas needed for KV or `tpot_s`, not rounded; None: unknown.

    Assumes that the time between tokens is proportional to the number of sequences. In fact part of
    it is constant, so one call changes too little for `tpot_s`, and later calls correct that.
    """
    if not loads:
        return None
    running = sum(load.running for load in loads)
    held = sum(load.kv_use for load in loads)
    waiting = sum(load.waiting for load in loads) + queued_requests
    if running > 0:
        held += waiting * held / running
    by_kv = held / settings.kv_use
    if settings.tpot_s is None:
        return by_kv
    by_speed = sum(min(load.decoding, 1.0) * load.tpot_s for load in loads) / settings.tpot_s
    return max(by_kv, by_speed)


def settle(need: float | None, bounds: Bounds, settings: ScalingSettings) -> int:
    """Scale up to the need at once, and down only to the need plus the fraction `slack`."""
    if need is None or not isfinite(need):
        return bounds.clip(bounds.current)
    up, down = ceil(need - _TINY), ceil(need * (1 + settings.slack) - _TINY)
    if up > bounds.current:
        return bounds.clip(up)
    return bounds.clip(min(down, bounds.current))


def together(
    prefill_wanted: int, decode_wanted: int, prefill: Bounds, decode: Bounds, settings: ScalingSettings
) -> tuple[int, int]:
    """Return the numbers of prefill and decode replicas, with their ratio within its limits.

    Raises the role that has too few; if its bounds prevent that, the other role would have idle
    replicas, and is limited within its own bounds.
    """
    fewest, most = settings.fewest_prefill_per_decode, settings.most_prefill_per_decode
    p = max(prefill_wanted, prefill.clip(ceil(decode_wanted * fewest - _TINY)))
    d = max(decode_wanted, decode.clip(ceil(prefill_wanted / most - _TINY)))
    if p > d * most + _TINY:
        p = prefill.clip(floor(d * most + _TINY))
    if p < d * fewest - _TINY:
        d = decode.clip(floor(p / fewest + _TINY))
    return p, d
