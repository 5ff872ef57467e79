"""Number of engines of each role, from the load of each replica. Pure.

    need        engines that would be as busy as the settings demand, a fraction
    settle      whole engines, with hysteresis
    together    both roles: neither starves the other, neither grows past what the other can match

A need comes from the load itself, not from a correction of the number of engines, so engines that
are still starting change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite

from configs.settings import ScalingSettings

_TINY = 1e-9
"""Tolerance for rounding errors of divisions, which must not add an engine."""


@dataclass(frozen=True)
class PrefillLoad:
    """Load of one prefill replica over the last seconds. Prompt tokens include those found in its
    prefix cache."""

    queued_tokens: float = 0.0
    """Tokens of prompts that it holds without a first token yet."""
    tokens_per_s: float = 0.0
    """Rate of computed prompt tokens."""
    tokens_per_busy_s: float = 0.0
    """The same rate over busy time; 0 until it is measured."""
    prompt_tokens: float = 0.0
    """Mean length of a prompt; 0 before the first one."""


@dataclass(frozen=True)
class DecodeLoad:
    """Load of one decode replica over the last seconds."""

    kv_use: float = 0.0
    """Fraction of the KV cache in use."""
    running: float = 0.0
    waiting: float = 0.0
    """Requests without blocks in the KV cache."""
    tpot_s: float = 0.0
    """Mean time between two tokens of a sequence; 0 before the first one."""
    decoding: float = 0.0
    """Mean number of decoding sequences; below 1 when it was idle for part of the time."""


@dataclass(frozen=True)
class Bounds:
    """Limits of the replicas of a role, and the number last requested from Serve."""

    lowest: int
    highest: int
    current: int

    def clip(self, engines: float) -> int:
        return int(min(max(engines, self.lowest, 1), self.highest))


def prefill_need(loads: Sequence[PrefillLoad], queued_requests: float, settings: ScalingSettings) -> float | None:
    """Return the engines needed for arriving and waiting prompts; None until a rate is measured.

    The length of `queued_requests`, which wait in routers, is unknown: they count as prompts of
    mean length.
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
    """Return the engines needed for KV, or for the token rate, whichever is more; None without a
    report.

    The time between tokens is taken to be proportional to the sequences on an engine. That errs
    towards too many engines above `tpot_s`, and towards removing too few below it: the time never
    falls to zero.
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
    """Return whole engines within the bounds: more as soon as `need` asks, fewer only with `slack`
    to spare."""
    if need is None or not isfinite(need):
        return bounds.clip(bounds.current)
    up, down = ceil(need - _TINY), ceil(need * (1 + settings.slack) - _TINY)
    if up > bounds.current:
        return bounds.clip(up)
    return bounds.clip(min(down, bounds.current))


def together(
    prefill_wanted: int, decode_wanted: int, prefill: Bounds, decode: Bounds, settings: ScalingSettings
) -> tuple[int, int]:
    """Return both numbers with the ratio kept: raise the role that is behind, within its bounds.

    If its bounds prevent that, hold the other role to what it can match: more engines would idle.
    """
    fewest, most = settings.fewest_prefill_per_decode, settings.most_prefill_per_decode
    p = max(prefill_wanted, prefill.clip(ceil(decode_wanted * fewest - _TINY)))
    d = max(decode_wanted, decode.clip(ceil(prefill_wanted / most - _TINY)))
    if p > d * most + _TINY:
        p = prefill.clip(floor(d * most + _TINY))
    if p < d * fewest - _TINY:
        d = decode.clip(floor(p / fewest + _TINY))
    return p, d
