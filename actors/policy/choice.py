"""List the options to serve one request with their expected costs, and choose one of them."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import xxhash

from actors.policy.costs import HANDOVER, LOCAL, PREFILL, STEP, Costs
from actors.policy.loads import EngineLoad
from configs.settings.router import RoutingSettings

CHEAPER = "cheaper"
"""Usually the route of lower cost. Failing engines and the session count before the cost."""

SHORT = "short_uncached"
"""Decode alone would compute and load fewer tokens than `local_below_tokens`."""

NO_PREFILL = "no_prefill"
"""No prefill engine accepts calls, or this request got no slot on one in `prefill_wait_s`."""

PREFILL_FAILED = "prefill_failed"
"""Prefill rejected this request, or failed it and no attempt, engine or free slot is left.

A late leg or a silent pair counts as a failure.
"""

OTHER_IDENTITY = "other_identity"
"""No prefill engine has the identity of a decode engine, which could not use its KV."""

MOVED = "moved"
"""The stream comes from a stopping decode engine, which sends its KV."""

SEVERAL_CHOICES = "n"
"""A request for several choices, and a prefill engine without `first_token_multiple`.

Decode's prefix cache could not share states or drafts among the choices (docs/decisions/0056).
"""

POLICY = "policy"
"""The policy does not compare local with remote."""

UNSEEN = "unseen"
"""The prefill engines are not known yet, or no decode engine is usable.

The decision lists no engines. The dispatcher takes the least busy ones of each role, or waits.
"""


class Estimate(NamedTuple):
    """Expected cost of one option: of a pair, or of decode alone (`prefill` None)."""

    decode: str
    prefill: str | None
    uncached_tokens: int  # to compute, on prefill or, without it, on decode
    loaded_tokens: int  # to load from the KV store of the same engine
    moved_tokens: int  # whose KV is transferred
    queue_s: float  # wait for other prompts
    compute_s: float  # load and computation of the prompt
    handover_s: float  # from the computed prompt to the first token; 0 without prefill
    decoding_s: float  # of the answer after its first token
    interference_s: float  # delay of other streams on the decode engine, summed

    @property
    def ttft_s(self) -> float:
        return self.queue_s + self.compute_s + self.handover_s


class Decision(NamedTuple):
    """Destination of a request: the engines of each role, best first; empty: the least busy."""

    route: str  # local or remote
    reason: str  # a constant of this module, or why decode serves the whole request
    policy: str
    prompt_tokens: int  # estimated
    decode: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()  # empty on the local route
    chosen: Estimate | None = None
    other: Estimate | None = None  # best option of the other route
    kv_tokens: int = 0  # that prompt and expected answer add to those in use on decode

    @property
    def local(self) -> bool:
        return self.route == "local"

    def explain(self, **more: object) -> str:
        """Return the decision and `more` as JSON, without lists of engines; times are rounded to
        microseconds.
        """
        fields: dict[str, object] = dict(zip(self._fields[:4], self[:4], strict=True))
        for name, estimate in (("chosen", self.chosen), ("other", self.other)):
            if estimate is not None:
                fields[name] = _fields(estimate)
        return json.dumps(fields | more, separators=(",", ":"))


def _fields(estimate: Estimate) -> dict[str, object]:
    numbers = {name: value for name, value in estimate._asdict().items() if value is not None}
    numbers["ttft_s"] = estimate.ttft_s
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in numbers.items()}


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


class Asked(NamedTuple):
    """Constraints of the choice."""

    whole: str | None = None  # reason why decode must serve all of the request
    session: str | None = None
    prefill_known: bool = True  # whether the running prefill engines are known
    prefill_failed: bool = False  # whether a prefill engine has already failed this request
    identities: Mapping[str, str] = {}  # of each engine; empty if all are equal


NO_CONSTRAINT = Asked()


def choose(settings: RoutingSettings, options: Options, asked: Asked) -> Decision:
    """Return the decision with all usable engines of its route, best first.

    The dispatcher needs all of them, because the first engine may have no free slot. The decision
    has none if its reason is UNSEEN, or if no decode engine is usable.
    """
    decode, prefill = options.decode, options.prefill
    affinities = [_affinity(asked.session, one.engine) for one in decode]
    differ = _differ(options, asked.identities)
    if differ is not None and not differ.all():
        # A session leaves decode engines that have no prefill engine of their identity.
        affinities = [0.0 if row.all() else own for row, own in zip(differ, affinities, strict=True)]
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
    if differ is not None and settings.policy in ("round_robin", "least_load"):
        keys.append(_busyness(options, ~differ))
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


def _busyness(options: Options, fits: np.ndarray) -> np.ndarray:
    """Return how busy the identity of each decode engine is, in shape (decode engines, 1).

    This is the number of its sequences, with the new one, divided by the smaller of its shares of
    all prefill and all decode engines. Otherwise an identity with many decode engines would
    overload its few prefill engines.
    """
    peers = fits @ fits.T
    capacity = np.minimum(fits.mean(axis=1), peers.mean(axis=1))
    calls = peers @ np.array([one.calls for one in options.decode])
    busyness: np.ndarray = (calls + 1) / np.maximum(capacity, np.finfo(float).tiny)
    return busyness[:, None]


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
