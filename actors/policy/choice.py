"""Chooses among a request's options under the configured policy. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from actors.policy.decision import CHEAPER, NO_PREFILL, POLICY, PREFILL_FAILED, SHORT, UNSEEN, Decision, Estimate
from actors.policy.options import Options
from configs.settings import RoutingSettings

FAILING_S = 5.0
"""Seconds for which a replica ranks last after a failed call: without calls it would look idle
until Serve detects its failure.
"""

Key = Callable[[Estimate], tuple[float, ...]]


@dataclass(frozen=True)
class Asked:
    """Constraints of the choice.

    ``whole``           reason why decode must serve all of the request, or None
    ``session``         session of the request, which prefers one decode replica; or None
    ``prefill_known``   whether the running prefill replicas are known
    ``prefill_failed``  whether a prefill replica has already failed this request
    """

    whole: str | None = None
    session: str | None = None
    prefill_known: bool = True
    prefill_failed: bool = False


def score(settings: RoutingSettings, estimate: Estimate) -> float:
    """Return the total cost of an option in seconds of time to first token."""
    return (
        estimate.ttft_s
        + settings.decode_weight * estimate.decoding_s
        + settings.interference_weight * estimate.interference_s
    )


def choose(settings: RoutingSettings, options: Options, asked: Asked) -> Decision:
    """Return the decision, with all usable replicas ranked: the first may have no free slot."""
    key = _key(settings, options, asked.session)
    local = sorted(options.local, key=key)
    remote = sorted(options.remote, key=key) if asked.whole is None else []
    route, reason = _route(settings, options, asked, local, remote, key)
    ranked, others = (local, remote) if route == "local" else (remote, local)
    if not ranked:
        return Decision(route, reason, settings.policy, options.prompt_tokens)
    chosen = ranked[0]
    return Decision(
        route,
        reason,
        settings.policy,
        options.prompt_tokens,
        decode=tuple(dict.fromkeys(one.decode for one in ranked)),
        prefill=tuple(one.prefill for one in ranked if one.decode == chosen.decode and one.prefill is not None),
        chosen=chosen,
        other=others[0] if others else None,
    )


def _route(
    settings: RoutingSettings, options: Options, asked: Asked, local: list[Estimate], remote: list[Estimate], key: Key
) -> tuple[str, str]:
    if asked.whole is not None:
        return "local", asked.whole
    if settings.policy == "never_remote":
        return "local", POLICY
    if asked.prefill_known and not options.prefill:
        return "local", PREFILL_FAILED if asked.prefill_failed else NO_PREFILL
    if not remote:
        return "remote", UNSEEN
    if settings.policy != "cost":
        return "remote", POLICY
    if local[0].uncached_tokens < settings.local_below_tokens:
        return "local", SHORT
    return ("local" if key(local[0]) <= key(remote[0]) else "remote"), CHEAPER


def _key(settings: RoutingSettings, options: Options, session: str | None) -> Key:
    """Return the sort key of the policy. The session's decode replica ranks first."""

    def affinity(decode: str) -> float:
        # Highest hash wins: all routers choose the same replica, and scaling moves few sessions.
        return -float(xxhash.xxh3_64_intdigest(f"{session}\0{decode}".encode())) if session is not None else 0.0

    def failing(one: Estimate) -> bool:
        loads = (options.decode_loads.get(one.decode), options.prefill_loads.get(one.prefill or ""))
        times = [load.failed_at for load in loads if load is not None and load.failed_at is not None]
        return any(options.now - failed_at < FAILING_S for failed_at in times)

    decode_order = {decode: position for position, decode in enumerate(options.decode)}
    prefill_order = {prefill: position for position, prefill in enumerate(options.prefill)}

    def by_order(one: Estimate) -> tuple[float, ...]:
        return affinity(one.decode), decode_order[one.decode], prefill_order.get(one.prefill or "", 0)

    def by_load(one: Estimate) -> tuple[float, ...]:
        return affinity(one.decode), options.ongoing_decode(one.decode), options.ongoing_prefill(one.prefill or "")

    def by_cost(one: Estimate) -> tuple[float, ...]:
        return affinity(one.decode), score(settings, one)

    by_policy = {"round_robin": by_order, "least_load": by_load}.get(settings.policy, by_cost)
    return lambda one: (failing(one), *by_policy(one))
