"""Choose among a request's options under the configured policy.

Has no state or clock of its own: the options supply the time, the loads and the costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from actors.policy.decision import (
    CHEAPER,
    NO_PREFILL,
    OTHER_IDENTITY,
    POLICY,
    PREFILL_FAILED,
    SHORT,
    UNSEEN,
    Decision,
    Estimate,
)
from actors.policy.loads import EngineLoad
from actors.policy.options import Options
from configs.settings.router import RoutingSettings

FAILING_S = 5.0
"""Time in seconds for which options with a replica come last after a call to it failed.

Without calls, such a replica would seem idle until Serve detects its failure.
"""

SILENT_S = 300.0
"""Time in seconds for which options with a replica come last after it was silent.

The time ends earlier if the replica computes something.

A hung engine accepts calls, and each would wait for `silence_timeout_s`. With the defaults
of `transfer.step_s` and `silence_timeout_s`, Serve replaces the engine within this time
(`HUNG_MARGIN_S` in `actors/engine/heartbeat.py`). With a longer `transfer.step_s`, one request may
wait for the hung engine after each SILENT_S.
"""

Key = Callable[[Estimate], tuple[float, ...]]


@dataclass(frozen=True)
class Asked:
    """Constraints of the choice.

    ``whole``           reason why decode must serve all of the request, or None
    ``session``         id of the request's session, or None. Options with the session's decode
                        replica come first, unless a replica of theirs failed or was silent recently
    ``prefill_known``   whether the running prefill replicas are known
    ``prefill_failed``  whether a prefill replica has already failed this request
    """

    whole: str | None = None
    session: str | None = None
    prefill_known: bool = True
    prefill_failed: bool = False


def score(settings: RoutingSettings, estimate: Estimate) -> float:
    """Return the weighted cost of an option, in seconds of time to first token."""
    return (
        estimate.ttft_s
        + settings.decode_weight * estimate.decoding_s
        + settings.interference_weight * estimate.interference_s
    )


def choose(settings: RoutingSettings, options: Options, asked: Asked) -> Decision:
    """Return the decision with all usable replicas of its route, best first.

    The dispatcher needs all of them, because the first replica may have no free slot. The decision
    has none if its reason is UNSEEN, or if no decode replica is usable.
    """
    local = remote = None
    names = list(options.decode)
    if names:
        failing = _all_failing(options.decode_load_list, options.now)
        local_order = _rank_local(settings, options, asked.session, failing)
        local = options.local(names[local_order[0]])
    mismatches = options.mismatches
    no_match = mismatches is not None and bool(options.prefill and names) and bool(mismatches.all())
    if asked.whole is None and options.prefill and names and not no_match:
        prefills = list(options.prefill)
        order, prefill_order = _rank_pairs(settings, options, asked.session, failing)
        remote = options.pair(names[order[0]], prefills[prefill_order[0]])
    route, reason = _route(settings, options, asked, local, remote, no_match)
    decode: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    chosen = other = None
    if route == "local" and local is not None:
        chosen, other = local, remote
        decode = tuple(names[index] for index in local_order)
    elif route == "remote" and remote is not None:
        chosen, other = remote, local
        decode = tuple(names[index] for index in order)
        prefill = tuple(prefills[index] for index in prefill_order)
    if chosen is None:
        return Decision(route, reason, settings.policy, options.prompt_tokens)
    return Decision(route, reason, settings.policy, options.prompt_tokens, decode, prefill, chosen, other)


def _rank_local(settings: RoutingSettings, options: Options, session: str | None, failing: Sequence[bool]) -> list[int]:
    """Return the positions of the decode replicas in the order of `_key`, best first.

    ``failing``  whether each decode replica comes last
    """
    if len(options.decode) == 1:
        return [0]
    keys: list[Any] = [failing] if any(failing) else []
    if session is not None:
        keys.append([_affinity(session, name) for name in options.decode])
    if settings.policy == "least_load":
        keys.append([options.ongoing_decode(name) for name in options.decode])
    elif settings.policy != "round_robin":
        keys.append(options.local_costs(settings.decode_weight, settings.interference_weight))
    order: list[int] = np.lexsort(keys[::-1]).tolist() if keys else list(range(len(options.decode)))
    return order


def _rank_pairs(
    settings: RoutingSettings, options: Options, session: str | None, failing: Sequence[bool]
) -> tuple[list[int], list[int]]:
    """Return positions of decode and of prefill replicas, best first, in the order of `_key`.

    Decode replicas are ordered by their best pair, prefill replicas by their pair with the best
    decode replica. Pairs with different identities come last.

    ``failing``  whether each decode replica comes last
    """
    shape = (len(options.decode), len(options.prefill))
    if shape == (1, 1):
        return [0], [0]

    def rows(values: Iterable[float]) -> np.ndarray:
        return np.broadcast_to(np.fromiter(values, float)[:, None], shape)

    def columns(values: Iterable[float]) -> np.ndarray:
        return np.broadcast_to(np.fromiter(values, float)[None, :], shape)

    keys = [] if options.mismatches is None else [options.mismatches]
    failing_prefill = _all_failing(options.prefill_load_list, options.now)
    if any(failing) or any(failing_prefill):
        keys.append(rows(failing) + columns(failing_prefill))
    if session is not None:
        keys.append(rows(_affinity(session, decode) for decode in options.decode))
    if settings.policy == "round_robin":
        keys += [rows(range(shape[0])), columns(range(shape[1]))]
    elif settings.policy == "least_load":
        keys += [
            rows(map(options.ongoing_decode, options.decode)),
            columns(map(options.ongoing_prefill, options.prefill)),
        ]
    else:
        keys.append(options.pair_costs(settings.decode_weight, settings.interference_weight))
    if len(keys) == 1:  # the sort of all pairs would take longer than the rest of the decision
        order = np.argsort(keys[0].min(axis=1), kind="stable").tolist()
        return order, np.argsort(keys[0][order[0]], kind="stable").tolist()
    pairs = np.lexsort([key.ravel() for key in reversed(keys)])
    ranks = np.empty(pairs.size, int)
    ranks[pairs] = np.arange(pairs.size)
    ranks = ranks.reshape(shape)
    order = ranks.min(axis=1).argsort().tolist()
    return order, ranks[order[0]].argsort().tolist()


def _route(
    settings: RoutingSettings,
    options: Options,
    asked: Asked,
    local: Estimate | None,
    remote: Estimate | None,
    no_match: bool,
) -> tuple[str, str]:
    if asked.whole is not None:
        return "local", asked.whole
    if settings.policy == "never_remote":
        return "local", POLICY
    if asked.prefill_known and not options.prefill:
        return "local", PREFILL_FAILED if asked.prefill_failed else NO_PREFILL
    if no_match:
        return "local", PREFILL_FAILED if asked.prefill_failed else OTHER_IDENTITY
    if remote is None or local is None:
        return "remote", UNSEEN
    if settings.policy != "cost":
        return "remote", POLICY
    # A load of stored tokens has a cost too.
    if local.uncached_tokens + local.loaded_tokens < settings.local_below_tokens:
        return "local", SHORT
    key = _key(settings, options, asked.session)
    return ("local" if key(local) <= key(remote) else "remote"), CHEAPER


def _affinity(session: str, decode: str) -> float:
    # Rendezvous hashing: all routers prefer the same replica, and scaling moves few sessions.
    return -float(xxhash.xxh3_64_intdigest(f"{session}\0{decode}".encode()))


def _failing(load: EngineLoad | None, now: float) -> bool:
    if load is None:
        return False
    failed = load.failed_at is not None and now - load.failed_at < FAILING_S
    return failed or (load.silent_at is not None and now - load.silent_at < SILENT_S)


def _all_failing(loads: Iterable[EngineLoad], now: float) -> list[bool]:
    return [_failing(load, now) for load in loads]


def _key(settings: RoutingSettings, options: Options, session: str | None) -> Key:
    """Return the sort key of options.

    Options with a replica that failed or was silent recently come last, those with two such
    replicas at the very end. With a session, the hashes of `_affinity` then order the decode
    replicas. The policy orders options that are still equal.
    """

    def affinity(decode: str) -> float:
        return _affinity(session, decode) if session is not None else 0.0

    def failing(one: Estimate) -> int:
        loads = (options.decode_loads.get(one.decode), options.prefill_loads.get(one.prefill or ""))
        return sum(_failing(load, options.now) for load in loads)

    def by_order(one: Estimate) -> tuple[float, ...]:
        prefill = 0 if one.prefill is None else list(options.prefill).index(one.prefill)
        return affinity(one.decode), list(options.decode).index(one.decode), prefill

    def by_load(one: Estimate) -> tuple[float, ...]:
        return affinity(one.decode), options.ongoing_decode(one.decode), options.ongoing_prefill(one.prefill or "")

    def by_cost(one: Estimate) -> tuple[float, ...]:
        return affinity(one.decode), score(settings, one)

    by_policy = {"round_robin": by_order, "least_load": by_load}.get(settings.policy, by_cost)
    return lambda one: (failing(one), *by_policy(one))
