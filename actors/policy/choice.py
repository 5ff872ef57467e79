"""Choose among a request's options under the configured policy."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

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
from actors.policy.options import Candidate, Options, score
from configs.settings.router import RoutingSettings


class Asked(NamedTuple):
    """Constraints of the choice."""

    whole: str | None = None  # reason why decode must serve all of the request
    session: str | None = None
    prefill_known: bool = True  # whether the running prefill engines are known
    prefill_failed: bool = False  # whether a prefill engine has already failed this request
    identities: Mapping[str, str] = {}  # of each engine; empty if all are equal


def choose(settings: RoutingSettings, options: Options, asked: Asked) -> Decision:
    """Return the decision with all usable engines of its route, best first.

    The dispatcher needs all of them, because the first engine may have no free slot. The decision
    has none if its reason is UNSEEN, or if no decode engine is usable.
    """
    decode, prefill = options.decode, options.prefill
    affinities = [_affinity(asked.session, one.engine) for one in decode]
    differ = _differ(options, asked.identities)
    local = remote = local_first = None
    if decode:
        alone = _rank_alone(settings, options, affinities)
        local = options.local[alone[0]]
    if decode and prefill and (differ is None or not differ.all()):
        paired, partners = _rank_pairs(settings, options, affinities, differ)
        remote = options.pair(paired[0], partners[0])
        failing = decode[paired[0]].failing + prefill[partners[0]].failing
        key = decode[alone[0]].failing, affinities[alone[0]], score(settings, options.local[alone[0]])
        local_first = key <= (failing, affinities[paired[0]], score(settings, remote))
    route, reason = _route(settings, options, asked, local, local_first)
    head = route, reason, settings.policy, options.prompt_tokens
    if route == "local" and local is not None:
        return Decision(*head, _named(decode, alone), (), local, remote)
    if route == "remote" and remote is not None:
        return Decision(*head, _named(decode, paired), _named(prefill, partners), remote, local)
    return Decision(*head)


def _rank_alone(settings: RoutingSettings, options: Options, affinities: list[float]) -> list[int]:
    """Return the positions of the decode engines, best first."""
    if len(options.decode) == 1:
        return [0]
    costs: Sequence[float]
    if settings.policy == "round_robin":
        costs = range(len(options.decode))
    elif settings.policy == "least_load":
        costs = [one.calls for one in options.decode]
    else:
        costs = [score(settings, one) for one in options.local]
    keys = [(one.failing, *rest) for one, *rest in zip(options.decode, affinities, costs, strict=True)]
    return sorted(range(len(keys)), key=keys.__getitem__)


def _rank_pairs(
    settings: RoutingSettings, options: Options, affinities: list[float], differ: np.ndarray | None
) -> tuple[list[int], list[int]]:
    """Return the positions of the decode engines and of the prefill engines, best first.

    Decode engines are ordered by their best pair, prefill engines by their pair with the best
    decode engine. Pairs that cannot exchange KV (`differ`) come last.
    """
    decode, prefill = options.decode, options.prefill
    if len(decode) == len(prefill) == 1:
        return [0], [0]
    keys = [] if differ is None else [differ]
    if any(one.failing for one in (*decode, *prefill)):
        keys.append(np.array([[one.failing] for one in decode], int) + [one.failing for one in prefill])
    if any(affinities):
        keys.append(np.array(affinities)[:, None])
    if settings.policy == "round_robin":
        keys.append(np.arange(len(decode) * len(prefill)).reshape(len(decode), -1))
    elif settings.policy == "least_load":
        keys += [np.array([[one.calls] for one in decode]), np.array([one.calls for one in prefill])]
    else:
        keys.append(options.pair_costs(settings))
    ranks = keys[0]
    if len(keys) > 1:  # the sort of all pairs would take longer than the rest of the decision
        order = np.lexsort([key.ravel() for key in reversed(np.broadcast_arrays(*keys))])
        ranks = np.empty((len(decode), len(prefill)), int)
        ranks.ravel()[order] = np.arange(order.size)
    first = ranks.min(axis=1).argsort(kind="stable").tolist()
    return first, ranks[first[0]].argsort(kind="stable").tolist()


def _differ(options: Options, identities: Mapping[str, str]) -> np.ndarray | None:
    """Return which pairs have different identities; None if all are equal."""
    if not identities:  # the usual case
        return None
    # An engine without an entry has just stopped.
    decode = np.array([identities.get(one.engine, "") for one in options.decode])
    prefill = np.array([identities.get(one.engine, "") for one in options.prefill])
    differ: np.ndarray = decode[:, None] != prefill
    return differ


def _affinity(session: str | None, engine: str) -> float:
    # Rendezvous hashing: all routers prefer the same engine, and scaling moves few sessions.
    return 0.0 if session is None else -float(xxhash.xxh3_64_intdigest(f"{session}\0{engine}".encode()))


def _named(engines: Sequence[Candidate], order: list[int]) -> tuple[str, ...]:
    return tuple([engines[index].engine for index in order])


def _route(
    settings: RoutingSettings, options: Options, asked: Asked, local: Estimate | None, local_first: bool | None
) -> tuple[str, str]:
    """Return route and reason; `local_first` is None if there is no pair that can exchange KV."""
    prefill_failed = PREFILL_FAILED if asked.prefill_failed else None
    if asked.whole is not None:
        return "local", asked.whole
    if settings.policy == "never_remote":
        return "local", POLICY
    if asked.prefill_known and not options.prefill:
        return "local", prefill_failed or NO_PREFILL
    if local is None or not options.prefill:
        return "remote", UNSEEN
    if local_first is None:
        return "local", prefill_failed or OTHER_IDENTITY
    if settings.policy != "cost":
        return "remote", POLICY
    # A load of stored tokens has a cost too.
    if local.uncached_tokens + local.loaded_tokens < settings.local_below_tokens:
        return "local", SHORT
    return "local" if local_first else "remote", CHEAPER
