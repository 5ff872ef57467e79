"""The choice among options, and the expected cost of options."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from actors.policy import choice
from actors.policy.choice import Asked, choose, score
from actors.policy.costs import Costs
from actors.policy.loads import EngineLoad
from actors.policy.options import Options
from configs.settings.router import RoutingSettings

ASSUMED = RoutingSettings(
    assumed_prefill_overhead_s=0.1,
    assumed_prefill_tokens_per_s=1000,
    assumed_handover_s=0.05,
    assumed_transfer_tokens_per_s=10_000,
    assumed_step_s=0.064,
)
"""With these, 1024 new tokens take 0.1 + 1.024 + 1.024 x 512 / 32768 = 1.14 s."""


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


def options(tokens=1024, answer=1, decode=(), prefill=(), held=(), stored=(), **loads: EngineLoad) -> Options:
    """Return replicas by name, one letter each; `held` and `stored` are pairs of replica and
    tokens.
    """
    held, stored = dict(held), dict(stored)
    return Options(
        tokens,
        answer,
        {one: len(loads[one].calls) if one in loads else 0 for one in decode},
        {one: len(loads[one].calls) if one in loads else 0 for one in prefill},
        {one: held.get(one, 0) for one in decode},
        {one: held.get(one, 0) for one in prefill},
        {one: stored[one] for one in decode if one in stored},
        {one: stored[one] for one in prefill if one in stored},
        {one: loads[one] for one in decode if one in loads},
        {one: loads[one] for one in prefill if one in loads},
        Costs(ASSUMED),
        0.0,
    )


ONE: dict[str, Any] = {"decode": "d", "prefill": "p"}


@pytest.mark.parametrize(
    ("given", "queue_s", "compute_s", "interference_s"),
    [
        ({}, 0, 1.14, 0),
        ({"d": busy(0.5, 0.25)}, 0.75, 1.14, 0),
        # Beside 64 streams each new token takes twice as long, and delays each stream by all of it.
        ({"d": busy(streams=64)}, 0, 1.14 + 1.024, 64 * 2.164 + 64 * 0.001),
        # 24 tokens after 1000: 0.1 + 0.024 + 0.024 x 1012 / 32768
        ({"held": [("d", 1000)]}, 0, 0.1 + 0.024 + 0.000741, 0),
        # 900 tokens more from the store at 100,000 tokens/s.
        ({"held": [("d", 100)], "stored": [("d", 900)]}, 0, 0.1 + 0.009 + 0.024 + 0.000741, 0),
    ],
)
def test_decode_alone_by_hand(given, queue_s, compute_s, interference_s):
    """The cost has a queue, a prefill among streams, and their delay.

    One more stream costs each a thousandth of a second.
    """
    estimate = options(**ONE, **given).local("d")
    assert estimate.queue_s == pytest.approx(queue_s)
    assert estimate.compute_s == pytest.approx(compute_s, abs=1e-6)
    assert estimate.handover_s == 0
    assert estimate.interference_s == pytest.approx(interference_s)


@pytest.mark.parametrize(
    ("given", "queue_s", "compute_s", "handover_s", "moved"),
    [
        ({}, 0, 1.14, 0.05 + 0.1024, 1024),
        ({"p": busy(0.5, 0.25)}, 0.75, 1.14, 0.1524, 1024),
        ({"d": busy(streams=32)}, 0, 1.14, 0.1524 + 0.032, 1024),
        ({"held": [("p", 1000)]}, 0, 0.124741, 0.1524, 1024),
        ({"held": [("d", 1000)]}, 0, 1.14, 0.0524, 24),
        # 1000 tokens from prefill's store at 100,000 tokens/s; decode receives all tokens.
        ({"stored": [("p", 1000)]}, 0, 0.134741, 0.1524, 1024),
        ({"held": [("p", 100)], "stored": [("p", 900)]}, 0, 0.133741, 0.1524, 1024),
    ],
)
def test_a_pair_by_hand(given, queue_s, compute_s, handover_s, moved):
    """The cost has a queue, a prefill, and the transfer of KV that decode has not cached."""
    estimate = options(**ONE, **given).pair("d", "p")
    assert (estimate.decode, estimate.prefill) == ("d", "p")
    assert estimate.queue_s == pytest.approx(queue_s)
    assert estimate.compute_s == pytest.approx(compute_s, abs=1e-6)
    assert estimate.handover_s == pytest.approx(handover_s)
    assert estimate.moved_tokens == moved
    assert estimate.ttft_s == pytest.approx(queue_s + compute_s + handover_s, abs=1e-6)


def test_decoding_by_hand():
    """100 tokens are 99 steps after the first; beside 31 streams a step takes 0.064 x (1 + 32 /
    64) s.
    """
    estimate = options(**ONE, answer=100, d=busy(streams=31)).pair("d", "p")
    assert estimate.decoding_s == pytest.approx(99 * 0.096)
    assert estimate.interference_s == pytest.approx(100 * 31 * 0.001)


def test_calls_of_other_routers_count():
    """Serve reports three calls on each that this router has not sent: two more streams, three
    more prompts.
    """
    crowd = replace(options(**ONE), decode={"d": 3}, prefill={"p": 3})
    estimate = crowd.pair("d", "p")
    assert estimate.queue_s == pytest.approx(3 * 1.14, abs=1e-5)
    assert estimate.handover_s == pytest.approx(0.1524 + 0.003)


@pytest.mark.parametrize(
    ("given", "route", "reason", "decode", "prefill"),
    [
        # Equal work: without a transfer it ends sooner.
        ({}, "local", "cheaper", "d", None),
        ({"tokens": 31}, "local", "short_uncached", "d", None),
        ({"tokens": 1024, "held": [("d", 1000)], "d": busy(streams=50)}, "local", "short_uncached", "d", None),
        # One stream delayed by 1.14 s for this prefill outweighs the transfer.
        ({"d": busy(streams=1)}, "remote", "cheaper", "d", "p"),
        ({"d": busy(0.2)}, "remote", "cheaper", "d", "p"),
        ({"d": busy(0.2), "p": busy(0.2)}, "local", "cheaper", "d", None),
        ({"d": busy(streams=1), "p": busy(3.0)}, "local", "cheaper", "d", None),
        ({"held": [("p", 900)]}, "remote", "cheaper", "d", "p"),
        # Stored tokens have a cost: the load may be slow.
        ({"stored": [("d", 1000)]}, "local", "cheaper", "d", None),
        ({"stored": [("d", 1000)], "d": busy(streams=50)}, "remote", "cheaper", "d", "p"),
        ({"stored": [("p", 900)]}, "remote", "cheaper", "d", "p"),
        ({"stored": [("p", 900), ("d", 900)]}, "local", "cheaper", "d", None),
        # A cached prefix is better than a stored one, and a stored one better than none.
        ({"prefill": "pqr", "held": [("r", 900)], "stored": [("q", 900)]}, "remote", "cheaper", "d", "r"),
        ({"prefill": "pqr", "stored": [("q", 900)]}, "remote", "cheaper", "d", "q"),
        ({"decode": "de", "stored": [("e", 900)]}, "local", "cheaper", "e", None),
        ({"decode": "de", "prefill": "", "d": busy(streams=1)}, "local", "no_prefill", "e", None),
        ({"decode": "de", "d": busy(streams=1), "e": busy(streams=2)}, "remote", "cheaper", "d", "p"),
        ({"decode": "de", "held": [("e", 500)]}, "local", "cheaper", "e", None),
        ({"prefill": "pq", "d": busy(streams=1), "p": busy(0.5)}, "remote", "cheaper", "d", "q"),
        ({"prefill": "pq", "d": busy(streams=1), "p": busy(0.5), "held": [("p", 900)]}, "remote", "cheaper", "d", "p"),
        ({"decode": "", "prefill": "p"}, "remote", "unseen", None, None),
        ({"decode": "", "prefill": ""}, "local", "no_prefill", None, None),
    ],
)
def test_the_cheapest(given, route, reason, decode, prefill):
    """Expected route and replicas, computed by hand."""
    decision = choose(ASSUMED, options(**{**ONE, **given}), Asked())
    assert (decision.route, decision.reason) == (route, reason)
    assert next(iter(decision.decode), None) == decode
    assert next(iter(decision.prefill), None) == prefill


@pytest.mark.parametrize(
    ("policy", "route", "reason", "decode", "prefill"),
    [
        ("cost", "remote", "cheaper", "ed", "pq"),
        ("always_remote", "remote", "policy", "ed", "pq"),
        ("never_remote", "local", "policy", "ed", ""),
        ("round_robin", "remote", "policy", "de", "pq"),
        ("least_load", "remote", "policy", "ed", "qp"),
    ],
)
def test_policies(policy, route, reason, decode, prefill):
    """d has two streams and e a prompt; p has one prompt more than q, but has cached this one."""
    several = options(decode="de", prefill="pq", d=busy(streams=2), e=busy(0.1), p=busy(0.1), held=[("p", 1000)])
    decision = choose(ASSUMED.model_copy(update={"policy": policy}), several, Asked())
    assert (decision.route, decision.reason, decision.policy) == (route, reason, policy)
    assert ("".join(decision.decode), "".join(decision.prefill)) == (decode, prefill)


@pytest.mark.parametrize("policy", ["cost", "always_remote", "round_robin", "least_load"])
def test_engines_of_different_identities_are_not_paired(policy):
    """The best pair of one identity comes first; without one, decode serves alone."""
    rules = ASSUMED.model_copy(update={"policy": policy})
    several = options(decode="de", prefill="pq", d=busy(streams=2), e=busy(0.1, streams=3), p=busy(0.1))
    mixed = choose(rules, replace(several, identities={"d": "2", "e": "1", "p": "1", "q": "3"}), Asked())
    assert (mixed.route, mixed.decode[0], mixed.prefill[0]) == ("remote", "e", "p")
    none = replace(several, identities={"d": "2", "e": "2", "p": "1", "q": "3"})
    assert [choose(rules, none, Asked(prefill_failed=failed)).reason for failed in (False, True)] == [
        "other_identity",
        "prefill_failed",
    ]


def test_a_request_that_cannot_be_split():
    """Decode must serve the request; the choice of the replica is unchanged."""
    decision = choose(ASSUMED, options(decode="de", prefill="p", held=[("e", 512)]), Asked(whole="echo"))
    assert (decision.route, decision.reason, decision.decode, decision.prefill) == ("local", "echo", ("e", "d"), ())


@pytest.mark.parametrize("policy", ["cost", "round_robin", "least_load", "always_remote", "never_remote"])
def test_a_session_has_one_decode_replica(policy):
    """For any policy and load: sessions spread over replicas, and another replica moves few of
    them.
    """
    rules = ASSUMED.model_copy(update={"policy": policy})

    def decode_of(session: str, replicas: str) -> str:
        crowd = options(decode=replicas, prefill="p", d=busy(streams=3))
        return choose(rules, crowd, Asked(session=session)).decode[0]

    chosen = {session: decode_of(session, "def") for session in map(str, range(60))}
    assert set(chosen.values()) == set("def")
    assert chosen == {session: decode_of(session, "fed") for session in chosen}
    assert {decode_of(session, "defg") for session in chosen if decode_of(session, "defg") != chosen[session]} == {"g"}


def test_weights():
    """With weight 0 for the delay of other streams, decode computes the prompt itself."""
    loaded = options(**ONE, d=busy(streams=1))
    assert choose(ASSUMED, loaded, Asked()).route == "remote"
    assert choose(ASSUMED.model_copy(update={"interference_weight": 0.0}), loaded, Asked()).route == "local"
    estimate = loaded.local("d")
    assert score(ASSUMED, estimate) == pytest.approx(estimate.ttft_s + estimate.decoding_s + estimate.interference_s)


def test_a_decision_explains_itself():
    """The decision is compact JSON with the figures of both routes."""
    told = json.loads(choose(ASSUMED, options(**ONE, d=busy(0.2)), Asked()).explain())
    assert (told["route"], told["reason"], told["policy"], told["prompt_tokens"]) == ("remote", "cheaper", "cost", 1024)
    assert told["chosen"]["prefill"] == "p"
    assert "prefill" not in told["other"]
    assert told["other"]["queue_s"] == 0.2
    assert told["chosen"]["ttft_s"] == pytest.approx(1.2924)


@pytest.mark.parametrize("policy", ["always_remote", "least_load", "round_robin"])
@pytest.mark.parametrize(("role", "last"), [("decode", "p"), ("prefill", "d")])
def test_if_all_replicas_of_a_role_failed_those_of_the_other_are_still_ranked(policy, role, last):
    """The replica that has failed is ranked last, although it has less work."""
    loads = {name: busy(0.0 if name in "dp" else 0.5) for name in "depq"}
    for name in {*("de" if role == "decode" else "pq"), last}:
        loads[name].failed_at = 0.0
    given = options(decode="de", prefill="pq", **loads)
    decision = choose(ASSUMED.model_copy(update={"policy": policy}), given, Asked())
    assert (decision.prefill if role == "decode" else decision.decode)[-1] == last


@pytest.mark.parametrize("policy", ["cost", "always_remote", "never_remote", "least_load", "round_robin"])
@pytest.mark.parametrize("session", [None, "s"])
@pytest.mark.parametrize("seed", range(10))
def test_options_are_ranked_as_one_by_one(policy, session, seed):
    """Ranking all options at once gives the order of each one's own estimate; ties keep the
    replicas' order.
    """
    rng = random.Random(seed)
    decode, prefill = "abcdefg"[: rng.randint(1, 7)], "tuvwxyz"[: rng.randint(1, 7)]
    loads = {
        name: busy(*[rng.random()] * rng.randint(0, 2), streams=rng.choice([0, 0, 9])) for name in decode + prefill
    }
    loads[rng.choice(decode)].failed_at = loads[rng.choice(prefill)].failed_at = rng.choice([None, 0.0])
    held, stored = ([(rng.choice(decode + prefill), tokens)] for tokens in (500, 300))
    given = options(decode=decode, prefill=prefill, held=held, stored=stored, **loads)
    for pair in rng.sample([(p, d) for p in prefill for d in decode], k=rng.randint(0, len(prefill) * len(decode))):
        given.costs.observe_handover(pair, (0.05, 0.1, 0.0), rng.choice([0.01, 0.2, 3.0]), 0.0)
    for name in rng.sample(decode, k=rng.randint(0, len(decode))):
        given.costs.step.observe(name, (0.05, 0.02, 0.0), rng.choice([0.01, 0.2]), 0.0)
        given.costs.local.observe(name, (0.1, 0.5, 0.1, 0.0, 0.0), rng.choice([0.2, 3.0]), 0.0)
    for name in rng.sample(prefill, k=rng.randint(0, len(prefill))):
        given.costs.prefill.observe(name, (0.1, 0.5, 0.1, 0.01), rng.choice([0.2, 3.0]), 0.0)
    given.costs.keep_only(set(prefill) - {rng.choice(prefill)}, set(decode) - {rng.choice(decode)})
    settings = ASSUMED.model_copy(update={"policy": policy})
    key = choice._key(settings, given, session)  # noqa: SLF001
    pairs = sorted((given.pair(d, p) for d in decode for p in prefill), key=key)
    decision = choose(settings, given, Asked(session=session))
    alone = sorted((given.local(d) for d in decode), key=key)
    best, best_alone = (decision.other, decision.chosen) if decision.local else (decision.chosen, decision.other)
    assert (best, best_alone) == (pairs[0], alone[0])
    whole = choose(settings, given, Asked(session=session, whole="echo"))
    assert whole.decode == tuple(one.decode for one in alone)
    if not decision.local:
        assert decision.decode == tuple(dict.fromkeys(one.decode for one in pairs))
        assert decision.prefill == tuple(one.prefill for one in pairs if one.decode == pairs[0].decode)
