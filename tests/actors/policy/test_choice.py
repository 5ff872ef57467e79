"""The choice among options, and the expected cost of options."""

import json
import random

import pytest

from actors.policy.choice import Asked, Options, _affinity, candidate, choose, score
from actors.policy.costs import HANDOVER, LOCAL, PREFILL, STEP, Costs, prompt_quantities
from actors.policy.loads import EngineLoad
from configs.settings.router import RoutingSettings

ASSUMED = RoutingSettings(
    assumed_prefill_overhead_s=0.1,
    assumed_prefill_tokens_per_s=1000,
    assumed_handover_s=0.05,
    assumed_transfer_tokens_per_s=10_000,
    assumed_step_s=0.064,
)
"""With these, 1024 new tokens take 0.1 + 1.024 + 1.024 x 512 / 32768 = 1.14 s."""


def rules(policy: str) -> RoutingSettings:
    return ASSUMED.model_copy(update={"policy": policy})


def busy(*seconds: float, streams: int = 0) -> EngineLoad:
    """Return an engine with prompts that have waited since time 0, and streams."""
    load = EngineLoad()
    for key, one in enumerate(seconds):
        load.prompts.add(key, (), one, 0.0)
        load.calls.add(key)
    for key in range(100, 100 + streams):
        load.streams_begin(key, 0.0)
        load.calls.add(key)
    return load


def options(tokens=1024, answer=1, decode="d", prefill="p", held=(), stored=(), others=0, costs=None, **loads):
    """Return options for engines with names of one letter; `others` are calls of other routers."""

    def role(names):
        for one in names:
            load = loads.get(one, EngineLoad())
            yield candidate(one, load, len(load.calls) + others, dict(held).get(one, 0), dict(stored).get(one, 0), 0.0)

    return Options(tokens, answer, list(role(decode)), list(role(prefill)), costs or Costs(ASSUMED), 0.0)


@pytest.mark.parametrize(
    ("pair", "given", "queue_s", "compute_s", "handover_s", "decoding_s", "interference_s"),
    [
        (False, {}, 0, 1.14, 0, 0, 0),
        (False, {"d": busy(0.5, 0.25)}, 0.75, 1.14, 0, 0, 0),
        # Beside 64 streams each new token takes twice as long, and delays each stream by all of it.
        # One more stream costs each a thousandth of a second.
        (False, {"d": busy(streams=64)}, 0, 2.164, 0, 0, 64 * 2.164 + 64 * 0.001),
        # 24 tokens after 1000: 0.1 + 0.024 + 0.024 x 1012 / 32768
        (False, {"held": {"d": 1000}}, 0, 0.124741, 0, 0, 0),
        # 900 tokens more from the store at 100,000 tokens/s.
        (False, {"held": {"d": 100}, "stored": {"d": 900}}, 0, 0.133741, 0, 0, 0),
        (True, {}, 0, 1.14, 0.05 + 0.1024, 0, 0),
        (True, {"p": busy(0.5, 0.25)}, 0.75, 1.14, 0.1524, 0, 0),
        (True, {"d": busy(streams=32)}, 0, 1.14, 0.1524 + 0.032, 0, 0.032),
        (True, {"held": {"p": 1000}}, 0, 0.124741, 0.1524, 0, 0),
        (True, {"held": {"d": 1000}}, 0, 1.14, 0.0524, 0, 0),
        # From prefill's store at 100,000 tokens/s; decode receives all tokens.
        (True, {"held": {"p": 100}, "stored": {"p": 900}}, 0, 0.133741, 0.1524, 0, 0),
        # 99 steps after the first token; beside 31 streams a step takes 0.064 x (1 + 32 / 64) s.
        (True, {"answer": 100, "d": busy(streams=31)}, 0, 1.14, 0.1524 + 0.031, 99 * 0.096, 100 * 31 * 0.001),
        # Three calls of other routers on each: two more streams than ours, three more prompts.
        (True, {"others": 3}, 3 * 1.14, 1.14, 0.1524 + 0.003, 0, 0.003),
    ],
)
def test_costs_by_hand(pair, given, queue_s, compute_s, handover_s, decoding_s, interference_s):
    listed = options(**given)
    one = listed.pair(0, 0) if pair else listed.local[0]
    assert (one.decode, one.prefill) == ("d", "p" if pair else None)
    found = (one.queue_s, one.compute_s, one.handover_s, one.decoding_s, one.interference_s)
    assert found == pytest.approx((queue_s, compute_s, handover_s, decoding_s, interference_s), abs=1e-5)
    assert one.ttft_s == pytest.approx(queue_s + compute_s + handover_s, abs=1e-5)
    assert one.moved_tokens == (1024 - dict(given.get("held", ())).get("d", 0) if pair else 0)


@pytest.mark.parametrize(
    ("given", "route", "reason", "decode", "prefill"),
    [
        # Equal work: without a transfer it ends sooner.
        ({}, "local", "cheaper", "d", None),
        ({"tokens": 31}, "local", "short_uncached", "d", None),
        ({"held": {"d": 1000}, "d": busy(streams=50)}, "local", "short_uncached", "d", None),
        # One stream delayed by 1.14 s for this prefill outweighs the transfer.
        ({"d": busy(streams=1)}, "remote", "cheaper", "d", "p"),
        ({"d": busy(0.2)}, "remote", "cheaper", "d", "p"),
        ({"d": busy(0.2), "p": busy(0.2)}, "local", "cheaper", "d", None),
        ({"d": busy(streams=1), "p": busy(3.0)}, "local", "cheaper", "d", None),
        ({"held": {"p": 900}}, "remote", "cheaper", "d", "p"),
        # Stored tokens have a cost: the load may be slow.
        ({"stored": {"d": 1000}}, "local", "cheaper", "d", None),
        ({"stored": {"d": 1000}, "d": busy(streams=50)}, "remote", "cheaper", "d", "p"),
        ({"stored": {"p": 900}}, "remote", "cheaper", "d", "p"),
        ({"stored": {"p": 900, "d": 900}}, "local", "cheaper", "d", None),
        # A cached prefix is better than a stored one, and a stored one better than none.
        ({"prefill": "pqr", "held": {"r": 900}, "stored": {"q": 900}}, "remote", "cheaper", "d", "r"),
        ({"prefill": "pqr", "stored": {"q": 900}}, "remote", "cheaper", "d", "q"),
        ({"decode": "de", "stored": {"e": 900}}, "local", "cheaper", "e", None),
        ({"decode": "de", "prefill": "", "d": busy(streams=1)}, "local", "no_prefill", "e", None),
        ({"decode": "de", "d": busy(streams=1), "e": busy(streams=2)}, "remote", "cheaper", "d", "p"),
        ({"decode": "de", "held": {"e": 500}}, "local", "cheaper", "e", None),
        ({"prefill": "pq", "d": busy(streams=1), "p": busy(0.5)}, "remote", "cheaper", "d", "q"),
        ({"prefill": "pq", "d": busy(streams=1), "p": busy(0.5), "held": {"p": 900}}, "remote", "cheaper", "d", "p"),
        ({"decode": ""}, "remote", "unseen", None, None),
        ({"decode": "", "prefill": ""}, "local", "no_prefill", None, None),
    ],
)
def test_the_cheapest(given, route, reason, decode, prefill):
    decision = choose(ASSUMED, options(**given), Asked())
    assert (decision.route, decision.reason) == (route, reason)
    assert next(iter(decision.decode), None) == decode
    assert next(iter(decision.prefill), None) == prefill


@pytest.mark.parametrize(
    ("policy", "asked", "route", "reason", "decode", "prefill"),
    [
        # d has two streams and e a prompt; p has one prompt more than q, but has cached this one.
        ("cost", {}, "remote", "cheaper", "ed", "pq"),
        ("always_remote", {}, "remote", "policy", "ed", "pq"),
        ("never_remote", {}, "local", "policy", "ed", ""),
        ("round_robin", {}, "remote", "policy", "de", "pq"),
        ("least_load", {}, "remote", "policy", "ed", "qp"),
        # Decode must serve the request; the choice of the engine is unchanged.
        ("cost", {"whole": "echo"}, "local", "echo", "ed", ""),
        # The best pair of one identity comes first; without one, decode serves alone.
        ("always_remote", {"identities": {"d": "1", "e": "2", "p": "3", "q": "1"}}, "remote", "policy", "de", "qp"),
        ("round_robin", {"identities": {"d": "1", "e": "3", "p": "3", "q": "2"}}, "remote", "policy", "ed", "pq"),
        ("least_load", {"identities": {"d": "1", "e": "2", "p": "3", "q": "1"}}, "remote", "policy", "de", "qp"),
        ("least_load", {"identities": {"d": "1", "e": "2"}}, "local", "other_identity", "ed", ""),
        ("cost", {"identities": {"d": "1", "e": "2"}, "prefill_failed": True}, "local", "prefill_failed", "ed", ""),
    ],
)
def test_policies(policy, asked, route, reason, decode, prefill):
    several = options(decode="de", prefill="pq", d=busy(streams=2), e=busy(0.1), p=busy(0.1), held={"p": 1000})
    decision = choose(rules(policy), several, Asked(**asked))
    assert (decision.route, decision.reason, decision.policy) == (route, reason, policy)
    assert ("".join(decision.decode), "".join(decision.prefill)) == (decode, prefill)


@pytest.mark.parametrize("policy", ["least_load", "round_robin"])
@pytest.mark.parametrize(
    ("releases", "shares"),
    [
        # The first can serve a half, limited by prefill, the second a quarter, limited by decode.
        ({"defg": "1112", "pq": "12"}, {"1": 2 / 3, "2": 1 / 3}),
        ({"de": "12", "pqrs": "1112"}, {"1": 2 / 3, "2": 1 / 3}),
        ({"defg": "1122", "pq": "12"}, {"1": 0.5, "2": 0.5}),
        ({"defg": "1112", "pqrs": "1222"}, {"1": 0.5, "2": 0.5}),
        # Without prefill engines, an idle release gets nothing.
        ({"defg": "1112", "pq": "22"}, {"2": 1.0}),
    ],
)
def test_releases_share_prompts_by_their_smaller_side(policy, releases, shares):
    """Sixty requests at once, then each that ends is followed by another one."""
    (decode, _), (prefill, _) = releases.items()
    identities = dict(zip("".join(releases), "".join(releases.values()), strict=True))
    loads, open_calls = {name: EngineLoad() for name in decode + prefill}, []
    for key in range(600):
        turned = decode[key % len(decode) :] + decode[: key % len(decode)]
        found = choose(rules(policy), options(decode=turned, prefill=prefill, **loads), Asked(identities=identities))
        assert identities[found.decode[0]] == identities[found.prefill[0]]
        for name in (found.decode[0], found.prefill[0]):
            loads[name].calls.add(key)
        open_calls.append((key, found.decode[0], found.prefill[0]))
        if len(open_calls) > 60:
            ended, *names = open_calls.pop(0)
            for name in names:
                loads[name].calls.discard(ended)
    calls = {one: sum(identities[name] == one for _, name, _ in open_calls) / 60 for one in shares}
    assert calls == pytest.approx(shares, abs=0.03)


def test_a_session_leaves_engines_without_prefill():
    """Its decode engine would compute all its prompts; without any pair, it stays."""
    for session in map(str, range(8)):
        for prefill in "123":
            asked = Asked(session=session, identities={"d": "1", "e": "2", "p": prefill})
            before, now = (choose(ASSUMED, options(decode="de"), one) for one in (Asked(session=session), asked))
            paired = {"1": "d", "2": "e", "3": before.decode[0]}[prefill]
            assert now.decode[0] == paired


@pytest.mark.parametrize("policy", ["cost", "round_robin", "least_load", "always_remote", "never_remote"])
def test_a_session_has_one_decode_engine(policy):
    """Sessions spread over engines, and another engine moves few of them."""

    def decode_of(session: str, engines: str) -> str:
        return choose(rules(policy), options(decode=engines, d=busy(streams=3)), Asked(session=session)).decode[0]

    chosen = {session: decode_of(session, "def") for session in map(str, range(60))}
    assert set(chosen.values()) == set("def")
    assert chosen == {session: decode_of(session, "fed") for session in chosen}
    assert {decode_of(session, "defg") for session in chosen if decode_of(session, "defg") != chosen[session]} == {"g"}


def test_weights():
    """With weight 0 for the delay of other streams, decode computes the prompt itself."""
    loaded = options(d=busy(streams=1))
    assert choose(ASSUMED, loaded, Asked()).route == "remote"
    weights = {"interference_weight": 0.0, "decode_weight": 2.0}
    assert choose(ASSUMED.model_copy(update=weights), loaded, Asked()).route == "local"
    one = options(answer=9, d=busy(streams=1)).local[0]
    assert score(ASSUMED, one) == pytest.approx(one.ttft_s + one.decoding_s + one.interference_s)
    assert score(ASSUMED.model_copy(update=weights), one) == pytest.approx(one.ttft_s + 2 * one.decoding_s)


def test_a_decision_explains_itself():
    """The decision is compact JSON with the figures of both routes."""
    told = json.loads(choose(ASSUMED, options(d=busy(0.2)), Asked()).explain())
    assert (told["route"], told["reason"], told["policy"], told["prompt_tokens"]) == ("remote", "cheaper", "cost", 1024)
    assert told["chosen"]["prefill"] == "p"
    assert "prefill" not in told["other"]
    assert told["other"]["queue_s"] == 0.2
    assert told["chosen"]["ttft_s"] == pytest.approx(1.2924)


@pytest.mark.parametrize("policy", ["cost", "always_remote", "never_remote", "least_load", "round_robin"])
@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize("seed", range(10))
def test_options_are_ranked_as_one_by_one(policy, session, seed):
    """The ranking has the order of each option's estimate, and estimates are what is learnt.

    Failing engines come last, then the session counts; ties keep the engines' order.
    """
    rng = random.Random(seed)
    decode, prefill = "abcdefg"[: rng.randint(1, 7)], "tuvwxyz"[: rng.randint(1, 7)]
    names = decode + prefill
    loads = {name: busy(*[rng.random()] * rng.randint(0, 2), streams=rng.choice([0, 0, 9])) for name in names}
    for name in rng.sample(names, rng.randint(0, len(names))):
        loads[name].failed_at = rng.choice([None, 0.0])
    held, stored = {rng.choice(names): 500}, {rng.choice(names): 300}
    costs = Costs(ASSUMED)
    for cost, parts in ((HANDOVER, (0.05, 0.1, 0.0)), (PREFILL, (0.1, 0.5, 0.1, 0.01))):
        for p in rng.sample(prefill, rng.randint(0, len(prefill))):
            one = rng.choice(decode) if cost == HANDOVER else None
            costs.observe(cost, one, p, parts, rng.choice([0.01, 0.2, 3.0]), 0.0)
    for name in rng.sample(decode, rng.randint(0, len(decode))):
        costs.observe(STEP, name, None, (0.05, 0.02, 0.0), rng.choice([0.01, 0.2]), 0.0)
        costs.observe(LOCAL, name, None, (0.1, 0.5, 0.1, 0.0, 0.0), rng.choice([0.2, 3.0]), 0.0)
    costs.keep_only(set(prefill) - {rng.choice(prefill)}, set(decode) - {rng.choice(decode)})
    given = options(decode=decode, prefill=prefill, held=held, stored=stored, costs=costs, **loads)

    def key(option, at, other=0):
        by_policy = {
            "round_robin": (at, other),
            "least_load": (given.decode[at].calls, given.prefill[other].calls if option.prefill else 0),
        }.get(policy, (score(ASSUMED, option),))
        failing = sum(loads[name].failing(0.0) for name in (option.decode, option.prefill) if name)
        return failing, _affinity(session, option.decode), *by_policy

    pairs = [(key(given.pair(d, p), d, p), d, p) for d in range(len(decode)) for p in range(len(prefill))]
    pairs.sort()
    alone = sorted((key(one, at), at) for at, one in enumerate(given.local))
    decision = choose(rules(policy), given, Asked(session=session))
    best, best_alone = (decision.other, decision.chosen) if decision.local else (decision.chosen, decision.other)
    assert best is not None
    assert best_alone is not None
    assert (best, best_alone) == (given.pair(*pairs[0][1:]), given.local[alone[0][1]])
    if policy == "cost" and decision.reason == "cheaper":
        assert decision.local == (alone[0][0] <= pairs[0][0])
    whole = choose(rules(policy), given, Asked(session=session, whole="echo"))
    assert whole.decode == tuple(decode[at] for _, at in alone)
    if not decision.local:
        assert decision.decode == tuple(dict.fromkeys(decode[d] for _, d, _ in pairs))
        assert decision.prefill == tuple(prefill[p] for _, d, p in pairs if d == pairs[0][1])

    new, loaded, streams = best_alone.uncached_tokens, best_alone.loaded_tokens, given.decode[alone[0][1]].streams
    seconds = costs.parts(LOCAL, (*prompt_quantities(new, 1024 - new - loaded, loaded), new * streams), 0.0)
    assert best_alone.compute_s == pytest.approx(costs.expect_s(LOCAL, best_alone.decode, None, seconds, 0.0))
    new, loaded, streams = best.uncached_tokens, best.loaded_tokens, given.decode[pairs[0][1]].streams
    seconds = costs.parts(PREFILL, prompt_quantities(new, 1024 - new - loaded, loaded), 0.0)
    assert best.compute_s == pytest.approx(costs.expect_s(PREFILL, None, best.prefill, seconds, 0.0))
    seconds = costs.parts(HANDOVER, (1.0, best.moved_tokens, streams), 0.0)
    assert best.handover_s == pytest.approx(costs.expect_s(HANDOVER, best.decode, best.prefill, seconds, 0.0))
