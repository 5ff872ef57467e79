"""Compute the number of replicas of each role from the load of each running replica. Pure.

    *_need    number of replicas for the configured utilisation; not rounded
    settle    whole number of replicas, with hysteresis
    together  both roles: keep the ratio between them within its limits

A need is computed from the load itself, not as a correction of the number of replicas, so replicas
that are still starting do not change it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite

from configs.settings.scaling import ScalingSettings

_TINY = 1e-9
"""Tolerance for rounding errors of divisions, so that they add no replica."""


@dataclass(frozen=True)
class PrefillLoad:
    """Load of one prefill replica over the last seconds. Cached prompt tokens are included.

    ``queued_tokens``      prompt tokens of requests without a first token
    ``tokens_per_s``       prompt tokens per second, of finished prompts
    ``tokens_per_busy_s``  prompt tokens per second of computing prompts; 0 until measured
    ``prompt_tokens``      mean number of tokens of a prompt; 0 until measured
    """

    queued_tokens: float = 0.0
    tokens_per_s: float = 0.0
    tokens_per_busy_s: float = 0.0
    prompt_tokens: float = 0.0


@dataclass(frozen=True)
class DecodeLoad:
    """Load of one decode replica over the last seconds.

    ``kv_use``    fraction of the KV cache in use
    ``running``   running requests, over all data-parallel ranks
    ``waiting``   waiting requests that vLLM's scheduler has not deferred (`num_waiting_reqs`)
    ``tpot_s``    mean time between two tokens of a sequence; 0 until measured
    ``decoding``  mean number of decoding sequences; idle time counts as 0
    """

    kv_use: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    tpot_s: float = 0.0
    decoding: float = 0.0


@dataclass(frozen=True)
class Bounds:
    """Lowest, highest and last requested number of replicas of a role."""

    lowest: int
    highest: int
    current: int

    def clip(self, engines: float) -> int:
        return int(min(max(engines, self.lowest, 1), self.highest))


def prefill_need(loads: Sequence[PrefillLoad], queued_requests: float, settings: ScalingSettings) -> float | None:
    """Return the number of prefill replicas needed for arriving and queued prompts, not rounded.

    Returns None until a rate is measured. ``queued_requests`` is the number of requests waiting in
    routers. Their lengths are unknown, so each counts as a prompt of mean length.
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
    """Return the number of decode replicas needed for KV or `tpot_s`, the larger one, not rounded.

    Returns None if no replica has reported. Assumes that the time between tokens is proportional to
    the number of sequences on a replica. In fact part of this time is constant. So one call adds or
    removes too few replicas for `tpot_s`, and later calls correct the number.
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
    """Return the number of replicas for `need`, within the bounds.

    Scales up to the need at once, and down only to the need plus the fraction `slack`. An unknown
    or infinite need keeps the current number, unless the bounds exclude it.
    """
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

    Adds replicas to the role that has too few. If the bounds of this role prevent that, removes
    replicas of the other role, because they would be idle. The bounds of a role take precedence
    over the ratio.
    """
    fewest, most = settings.fewest_prefill_per_decode, settings.most_prefill_per_decode
    p = max(prefill_wanted, prefill.clip(ceil(decode_wanted * fewest - _TINY)))
    d = max(decode_wanted, decode.clip(ceil(prefill_wanted / most - _TINY)))
    if p > d * most + _TINY:
        p = prefill.clip(floor(d * most + _TINY))
    if p < d * fewest - _TINY:
        d = decode.clip(floor(p / fewest + _TINY))
    return p, d
