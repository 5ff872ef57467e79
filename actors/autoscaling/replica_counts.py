"""How many engines of each role are wanted: pure, from what each replica says of its load.

    need        engines that the load would keep as busy as the settings say, a fraction
    settle      whole engines; those that are there stay while they are nearly right (hysteresis)
    together    both roles: neither starves the other, neither grows past what the other can match

A need comes from the load itself, not from a correction of the number of engines: engines that are still starting
neither count as help nor make it ask for more.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor, isfinite

from configs.settings import ScalingSettings

_TINY = 1e-9
"""Less than any share of an engine that counts: what divisions leave over must not make one more."""


@dataclass(frozen=True)
class PrefillLoad:
    """One prefill replica, over the last seconds. Prompt tokens count in full, also those found in its prefix cache."""

    queued_tokens: float = 0.0
    """Of the prompts that it has and whose first token it has not given."""
    tokens_per_s: float = 0.0
    """What it got done."""
    tokens_per_busy_s: float = 0.0
    """The same, over the time in which it had a prompt to compute: its rate. 0: not measured yet."""
    prompt_tokens: float = 0.0
    """Mean length of a prompt; 0: none yet."""


@dataclass(frozen=True)
class DecodeLoad:
    """One decode replica, over the last seconds."""

    kv_use: float = 0.0
    """Fraction of its KV cache in use."""
    running: float = 0.0
    waiting: float = 0.0
    """Requests that have no place in its KV cache yet."""
    tpot_s: float = 0.0
    """Mean time between two tokens of a sequence; 0: none yet."""
    decoding: float = 0.0
    """Mean number of sequences in which tokens were written: below 1 it was idle for a part of the time."""


@dataclass(frozen=True)
class Bounds:
    """How many replicas of a role there may be, and how many Serve has been asked for."""

    lowest: int
    highest: int
    current: int

    def clip(self, engines: float) -> int:
        return int(min(max(engines, self.lowest, 1), self.highest))


def prefill_need(loads: Sequence[PrefillLoad], queued_requests: float, settings: ScalingSettings) -> float | None:
    """Engines for the prompts that come and for those that wait; None while no rate has been measured.

    `queued_requests` wait in routers, where their length is not known: they count as prompts of mean length.
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
    """Engines for the KV of what runs and waits, or for the speed that it is to have: whichever asks for more.

    None while no replica says anything. The time between tokens is taken to be proportional to the sequences on an
    engine, which errs towards too many engines above `tpot_s` and too few given back below it: it never falls to zero.
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
    """Whole engines within the bounds: more as soon as `need` asks, fewer only when it would allow for `slack` more."""
    if need is None or not isfinite(need):
        return bounds.clip(bounds.current)
    up, down = ceil(need - _TINY), ceil(need * (1 + settings.slack) - _TINY)
    if up > bounds.current:
        return bounds.clip(up)
    return bounds.clip(min(down, bounds.current))


def together(
    prefill_wanted: int, decode_wanted: int, prefill: Bounds, decode: Bounds, settings: ScalingSettings
) -> tuple[int, int]:
    """Both numbers with the ratio kept: the role that is behind is raised, as far as its bounds let it.

    Where they do not, the other role is held to what the bound one can match, as more of it would stand idle.
    """
    fewest, most = settings.fewest_prefill_per_decode, settings.most_prefill_per_decode
    p = max(prefill_wanted, prefill.clip(ceil(decode_wanted * fewest - _TINY)))
    d = max(decode_wanted, decode.clip(ceil(prefill_wanted / most - _TINY)))
    if p > d * most + _TINY:
        p = prefill.clip(floor(d * most + _TINY))
    if p < d * fewest - _TINY:
        d = decode.clip(floor(p / fewest + _TINY))
    return p, d
