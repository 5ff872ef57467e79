"""The router's learning from its requests, and its decisions."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policy.admission import KvCache
from actors.policy.choice import Asked, Estimate
from actors.policy.planner import Planner
from actors.policy.prefixes import STORES_KEPT, EngineStore
from actors.policy.prompts import read_prompt
from configs.settings.router import RoutingSettings

P = {"p": 0}
PQ = {"p": 0, "q": 0}
D = {"d": 0}
DE = {"d": 0, "e": 0}


def left(planner: Planner) -> dict[str, int]:
    """Return the number of engines with recorded work, by role, and of prefix pieces."""
    own: Any = planner
    caches = {**own._prefixes._caches, **own._stores.prefixes._caches}  # noqa: SLF001
    return {
        "prefill": len(own._prefill),  # noqa: SLF001
        "decode": len(own._decode),  # noqa: SLF001
        "pieces": sum(map(len, caches.values())),
    }


def planner_of(policy: str = "always_remote", **more) -> Planner:
    return Planner(RoutingSettings(policy=policy, **more))


def ids(count: int, first: int = 0):
    """Return a prompt of token ids."""
    return read_prompt({"prompt": list(range(first, first + count))})


def known(estimate: Estimate | None) -> Estimate:
    assert estimate is not None
    return estimate


def serve(planner: Planner, prompt, now: float, decode="d", prefill=None, prefill_s=0.4, handover_s=0.1, tokens=0):
    """Run one request from begin to end; return the time of its end."""
    inflight = planner.begin(prompt, decode, prefill, now)
    if prefill:
        planner.prefilled(inflight, now + prefill_s)
        now += handover_s
    planner.opened(inflight, now + prefill_s)
    planner.ended(inflight, now + prefill_s + 0.01 * tokens, tokens)
    return now + prefill_s + 0.01 * tokens


def test_a_slow_transfer_is_learnt():
    """A long prompt beside streams is sent to prefill, until transfers have taken 5 s each."""
    planner = Planner(RoutingSettings())
    planner.opened(planner.begin(ids(1), "d", None, 0.0), 0.1)
    now, routes = 1.0, []
    for n in range(6):
        routes.append(planner.decide(ids(4000, n * 4000), P, D, now).route)
        if routes[-1] == "remote":
            now = serve(planner, ids(4000, n * 4000), now, prefill="p", handover_s=5.0)
    assert (routes[0], routes[-1]) == ("remote", "local")


def test_a_slow_prefill_engine_is_left_alone():
    """An engine that is four times as slow gets only what the other has no room for."""
    planner, now = planner_of(), 0.0
    for n in range(20):
        for prefill, seconds in (("p", 0.4), ("q", 1.6)):
            now = serve(planner, ids(4000, n * 4000), now, prefill=prefill, prefill_s=seconds)
    first, second = (planner.decide(ids(4000, 10**6 + n), PQ, D, now) for n in range(2))
    assert first.prefill == second.prefill == ("p", "q")
    assert known(first.chosen).compute_s == pytest.approx(0.4, rel=0.1)
    for n in range(4):
        planner.begin(ids(4000, 2 * 10**6 + n), "d", "p", now)
    assert planner.decide(ids(4000, 3 * 10**6), PQ, D, now).prefill == ("q", "p")


def test_a_stream_that_moves_teaches_what_each_engine_made():
    """400 tokens at 0.1 s: 300 on d, the rest, with those repeated, on e."""
    planner = Planner(RoutingSettings())
    for _ in range(30):
        left, came = (planner.begin(ids(9), engine, None, 0.0) for engine in DE)
        planner.opened(left, 0.0)
        planner.ended(left, 30.0, 300, interrupted=True)
        planner.opened(came, 30.0)
        planner.ended(came, 40.0, 400, 300)
    assert planner.answer_tokens(ids(9)) == pytest.approx(400, rel=0.05)
    chosen = known(planner.decide(ids(9), {}, DE, 40.0).chosen)
    assert chosen.decoding_s == pytest.approx(0.1 * planner.answer_tokens(ids(9)), rel=0.1)


def test_slow_steps_and_slow_prompts_on_decode_are_learnt():
    """d takes 0.1 s for each token and 2 s for each prompt. Both are still costs of its role."""
    planner, now = Planner(RoutingSettings()), 0.0
    for n in range(10):
        slow = planner.begin(ids(1000, 1000 * n), "d", None, now)
        planner.opened(slow, now := now + 2.0)
        planner.ended(slow, now := now + 5.0, 51)
    chosen = known(planner.decide(ids(1000, 10**6), {}, DE, now, avoid=frozenset("e")).chosen)
    assert chosen.decoding_s == pytest.approx(0.1 * (planner.answer_tokens(ids(9)) - 1), rel=0.1)
    assert chosen.compute_s == pytest.approx(2.0, rel=0.1)
    planner.opened(planner.begin(ids(9), "d", None, now), now)
    for engine, other in (("d", "e"), ("e", "d")):
        chosen = known(planner.decide(ids(1000, 10**6), {}, DE, now, avoid=frozenset(other)).chosen)
        assert (chosen.interference_s > 2) == (engine == "d"), "the stream there waits for the prompt"


def store(name: str, tokens: int = 10**6, chunk_tokens: int = 64) -> EngineStore:
    return EngineStore(name, tokens, chunk_tokens)


def stored(planner: Planner, prompt, now: float, stores, prefill="p") -> float:
    """Serve a prompt by a prefill engine, as planned with these stores."""
    planner.decide(prompt, dict.fromkeys(stores, 0), D, now, stores=stores)
    return serve(planner, prompt, now, prefill=prefill)


def loaded(planner: Planner, prompt, now: float, engine: str, of: EngineStore) -> int:
    """Return the tokens that a new engine with this store is expected to load."""
    return known(planner.decide(prompt, {engine: 0}, D, now, stores={engine: of}).chosen).loaded_tokens


def test_a_restarted_engine_has_its_stored_prefixes():
    """The engine p2 replaces p on the same host: its cache is empty, its store is not.

    The router knows 62 pieces of 64 tokens of 4000; objects have 256 tokens: 15 x 256 = 3840.
    """
    planner = planner_of()
    first, second = store("first", chunk_tokens=256), store("second", chunk_tokens=256)
    now = stored(planner, ids(4000), 0.0, {"p": first, "q": second})
    decision = planner.decide(ids(4000), {"q": 0, "p2": 0}, D, now, stores={"q": second, "p2": first})
    assert decision.prefill[0] == "p2"
    assert (known(decision.chosen).loaded_tokens, known(decision.chosen).uncached_tokens) == (3840, 160)
    without = planner.decide(ids(4000), {"q": 0, "p2": 0}, D, now, stores={})
    assert known(without.chosen).loaded_tokens == 0


@pytest.mark.parametrize(
    ("capacity", "setting", "expected"),
    # 1024 tokens are 16 pieces; the prompt's last pieces are dropped first.
    [(10**6, 10**6, 3968), (1024, 10**6, 1024), (10**6, 1024, 1024), (10**6, 0, 0)],
)
def test_a_store_has_no_more_than_fits(capacity, setting, expected):
    planner = planner_of(prefix_tokens_per_store=setting)
    now = stored(planner, ids(4000), 0.0, {"p": store("first", capacity)})
    assert loaded(planner, ids(4000), now, "p2", store("first", capacity)) == expected


def test_decode_has_its_stored_answer_after_a_restart():
    """Decode's store has the prompt of 4000 tokens and the answer of 200."""
    planner = planner_of("never_remote")
    stores = {"p": store("first", chunk_tokens=1), "d": store("second", chunk_tokens=1)}
    planner.decide(ids(4000), P, D, 0.0, stores=stores)
    now = serve(planner, ids(4000), 0.0, tokens=200)
    after = planner.decide(ids(4300), P, {"d2": 0}, now, stores={"d2": stores["d"]})
    assert known(after.chosen).loaded_tokens == 4200


def test_a_store_outlives_its_engines_for_a_while():
    planner = planner_of()
    now = stored(planner, ids(4000), 0.0, {"p": store("first")})
    for others, expected in ((STORES_KEPT - 1, 3968), (STORES_KEPT, 0)):
        for other in range(others):
            planner.decide(ids(1), {"q": 0}, D, now, stores={"q": store(f"other {other}")})
        assert loaded(planner, ids(4000), now, "p2", store("first")) == expected


def test_a_prompt_is_stored_once_it_is_computed():
    """Until then, another engine with the same store cannot load it; after a failure never."""
    planner, host = planner_of(), store("host")
    planner.decide(ids(4000), P, D, 0.0, stores={"p": host})
    failing = planner.begin(ids(4000), "d", "p", 0.0)
    assert loaded(planner, ids(4000), 0.5, "p2", host) == 0
    planner.ended(failing, 1.0, broken=True)
    assert loaded(planner, ids(4000), 1.0, "p2", host) == 0
    planner.decide(ids(4000), P, D, 1.0, stores={"p": host})
    planner.prefilled(planner.begin(ids(4000), "d", "p", 1.0), 1.4)
    assert loaded(planner, ids(4000), 1.4, "p2", host) == 3968


def test_slow_loads_are_learnt():
    """After loads that take as long as the computation, a stored prefix attracts no requests."""
    planner, fast, now = planner_of(), planner_of(), 0.0
    first, second = store("first"), store("second")
    for n in range(8):
        prompt = ids(4000, 10_000 * n)
        now = stored(planner, prompt, now, {"p": first, "q": second})
        now = stored(planner, prompt, now, {f"p{n}": first, "q": second}, f"p{n}")
    seconds = []
    for each in (planner, fast):
        at = stored(each, ids(4000, 10**6), now, {"p": first, "q": second})
        again = each.decide(ids(4000, 10**6), {"p9": 0}, D, at, stores={"p9": first})
        seconds.append(known(again.chosen).compute_s)
    assert seconds[0] > 0.3
    assert seconds[1] < 0.1


def test_a_second_turn_goes_where_the_first_is():
    """e has the first turn's prompt and answer: it computes 100 of 1,700 tokens."""
    planner = Planner(RoutingSettings())
    now = serve(planner, ids(1000), 0.0, decode="e", prefill="p", tokens=600)
    decision = planner.decide(ids(1700), P, DE, now)
    assert (decision.route, decision.decode[0]) == ("local", "e")
    assert known(decision.chosen).uncached_tokens == 100
    assert known(decision.other).prefill == "p"
    assert known(decision.other).uncached_tokens == pytest.approx(740, abs=64)


@pytest.mark.parametrize(
    ("body", "prompt_tokens", "answer_tokens"),
    [
        ({"prompt": ""}, 1, 128),
        ({"prompt": "x" * 400}, 100, 128),
        ({"prompt": [1, 2, 3], "max_tokens": 16}, 3, 16),
        ({"prompt": ["x" * 400, [1, 2]], "n": 2, "max_tokens": 1000}, 102, 512),
        ({}, 1, 128),
    ],
)
def test_how_large_a_request_is(body, prompt_tokens, answer_tokens):
    """Before any measurement, the planner estimates the tokens of every kind of prompt."""
    planner, prompt = Planner(RoutingSettings()), read_prompt(body)
    assert (planner.prompt_tokens(prompt), planner.answer_tokens(prompt)) == (prompt_tokens, answer_tokens)
    assert planner.decide(prompt, P, D, 0.0).decode == ("d",)


def test_kv_to_commit():
    """A prompt's cached KV was free until now, unless an ongoing request uses it."""
    planner, prompt, longer = planner_of(), ids(640), ids(704)

    def commits(one) -> int:
        return planner.decide(one, P, D, 9.0).kv_tokens - planner.answer_tokens(one)

    assert [commits(one) for one in (prompt, longer)] == [640, 704]
    serve(planner, prompt, 0.0)
    assert [commits(one) for one in (prompt, longer)] == [640, 704]
    first, second, _ = (planner.begin(prompt, "d", "p", 1.0) for _ in range(3))
    assert [commits(one) for one in (prompt, longer)] == [640, 704], "they wait"
    for one in (first, second, first):
        planner.admitted(one)
    assert [commits(one) for one in (prompt, longer, ids(640, 1))] == [1, 64, 640]
    planner.ended(first, 2.0)
    assert commits(longer) == 64
    planner.ended(second, 2.0)
    assert commits(longer) == 704


def test_kv_to_commit_per_kv_cache_group():
    """A window or state needs a number of blocks that does not grow with a long request."""
    planner, caches = planner_of(), {"d": KvCache(64_000, 800, ((128, 0), (128, 256), (128, 256), (4096, 4096)))}

    def blocks(tokens: int) -> float:
        return planner.decide(ids(tokens), P, D, 9.0, kv_caches=caches).kv_tokens / 80

    answer = planner.answer_tokens(ids(1))
    assert answer == 128
    assert [blocks(tokens) for tokens in (64, 640, 1920)] == [2 + 2 + 2 + 1, 6 + 3 + 3 + 1, 16 + 3 + 3 + 1]
    planner.admitted(planner.begin(ids(640), "d", "p", 1.0))
    assert blocks(1920) == 11 + 3 + 3 + 1, "ongoing requests use five full blocks of full attention"


def test_engines_to_avoid():
    decision = planner_of().decide(ids(100), PQ, DE, 0.0, avoid=frozenset("qd"))
    assert (decision.prefill, decision.decode) == (("p",), ("e",))
    alone = Planner(RoutingSettings()).decide(ids(100), P, D, 0.0, avoid=frozenset("p"))
    assert (alone.route, alone.reason) == ("local", "no_prefill")


def test_a_failed_engine_comes_last_and_a_silent_one_for_longer():
    """They look idle, and the silent one accepts calls that time out, until it answers."""
    planner = planner_of()

    def ranked(now: float, prefill=None, decode=None) -> tuple[str, str]:
        decision = planner.decide(ids(100), prefill or {"p": 0, "q": 9}, decode or {"d": 9, "e": 0}, now)
        return "".join(decision.decode), "".join(decision.prefill)

    call = planner.begin(ids(1), "e", "p", 0.0)
    assert ranked(0.0) == ("ed", "pq")
    for silent, at, later in ((False, 0.0, 4.9), (True, 10.0, 200.0)):
        for engine in "ep":
            planner.failed(engine, at, silent)
        assert ranked(later) == ("de", "qp")
        assert ranked(later, P, {"e": 0}) == ("e", "p"), "the only one is still used"
        if not silent:
            assert ranked(5.1)[0] == "ed"
    planner.prefilled(call, 201.0)
    assert ranked(201.0) == ("de", "pq")
    planner.computed(call)
    assert ranked(202.0) == ("ed", "pq")
    planner.failed("e", 203.0, silent=True)
    assert ranked(600.0)[0] == "ed", "Serve has replaced an engine that hung for this time"


def test_prefill_is_idle_after_the_handover():
    """Prefill's calls have ended, although decode still generates."""
    planner = planner_of("least_load")
    calls = [planner.begin(ids(100 + n), "d", "p", 0.0) for n in range(2)]
    assert planner.decide(ids(1), {"p": 0, "q": 1}, DE, 1.0).prefill == ("q", "p")
    for call in calls:
        planner.handed_over(call)
    assert planner.decide(ids(1), {"p": 0, "q": 1}, DE, 1.0).prefill == ("p", "q")


def test_an_engine_that_has_stopped_is_forgotten():
    """The planner removes its costs, prefixes and load; a new engine of this name has none."""
    planner = Planner(RoutingSettings())
    serve(planner, ids(1000), 0.0, decode="e", prefill="p", prefill_s=9.0)
    hanging = planner.begin(ids(1000), "e", "p", 2.0)
    planner.decide(ids(1000), {"q": 0}, D, 3.0)
    assert left(planner)["decode"] == 1, "it has an open call"
    planner.ended(hanging, 3.0)
    planner.decide(ids(1000), {"q": 0}, D, 3.0)
    p, q = (planner.decide(ids(1000), {name: 0}, DE, 3.0, avoid=frozenset("d")).other for name in "pq")
    assert known(p).uncached_tokens == 1000
    assert known(p).compute_s == known(q).compute_s
    assert left(planner) == {"prefill": 0, "decode": 0, "pieces": 0}


def test_new_weights_keep_what_was_measured_and_new_assumptions_do_not():
    planner = Planner(RoutingSettings())
    for n in range(5):
        serve(planner, ids(1000, n * 1000), 10.0 * n, prefill="p", prefill_s=9.0)
    seconds = lambda: known(planner.decide(ids(1000, 10**6), P, D, 50.0).other).compute_s  # noqa: E731
    assert seconds() == pytest.approx(9.0, rel=0.1)
    planner.reconfigure(RoutingSettings(interference_weight=0.5, local_below_tokens=7, policy="never_remote"))
    assert planner.decide(ids(100), P, D, 50.0).policy == "never_remote"
    assert seconds() == pytest.approx(9.0, rel=0.1)
    planner.reconfigure(RoutingSettings(assumed_prefill_tokens_per_s=1000.0, policy="never_remote"))
    assert seconds() == pytest.approx(1.03, rel=0.05)


def test_what_broke_off_teaches_nothing():
    """Neither a dead prefill engine nor a client disconnect teaches a cost or leaves state."""
    planner = planner_of()
    before = known(planner.decide(ids(1000, 5000), P, D, 500.0).chosen)
    for n, answered in enumerate((False, True)):
        inflight = planner.begin(ids(1000), "d", "p", 100.0 * n)
        if answered:
            planner.prefilled(inflight, 100.0 * n + before.compute_s)
        planner.ended(inflight, 100.0 * n + 90, broken=True)
        planner.ended(inflight, 100.0 * n + 90)
        planner.opened(inflight, 100.0 * n + 95)
    after = known(planner.decide(ids(1000, 5000), P, D, 500.0).chosen)
    assert after.compute_s == pytest.approx(before.compute_s, rel=0.01)
    assert (after.handover_s, after.queue_s) == (before.handover_s, 0)
    again = known(planner.decide(ids(1000), P, D, 500.0).chosen)
    assert again.moved_tokens == 1000, "decode has not received the prompt"
    assert again.uncached_tokens < 100, "prefill has computed the prompt the second time"


bodies = st.one_of(
    st.builds(lambda n: {"prompt": list(range(n))}, st.integers(0, 3000)),
    st.builds(lambda text: {"prompt": text * 40}, st.text(max_size=60)),
    st.builds(lambda texts: {"prompt": texts}, st.lists(st.text(max_size=400), max_size=5)),
    st.builds(lambda t: {"messages": [{"role": "user", "content": one} for one in t]}, st.lists(st.text(), max_size=4)),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(bodies, st.floats(0, 30)), min_size=1, max_size=25), st.integers(0, 2**32))
def test_any_day_ends_at_rest(days, seed):
    """Requests of any kind that begin, open, end or break off in any order leave no load.

    Every decision is complete.
    """
    dice, open_requests, now = random.Random(seed), [], 0.0
    planner = planner_of(dice.choice(["cost", "least_load"]), prefix_tokens_per_engine=5000)
    for body, later in days:
        now += later
        prompt = read_prompt(body)
        prefill = {name: dice.randrange(3) for name in "pq"[: dice.randrange(3)]}
        decision = planner.decide(prompt, prefill, DE, now, Asked(session=dice.choice([None, "s"])))
        assert decision.local == (not decision.prefill)
        assert set(decision.decode) == {"d", "e"}
        chosen = known(decision.chosen)
        assert min(chosen.ttft_s, chosen.decoding_s, chosen.interference_s) >= 0
        assert 0 < chosen.uncached_tokens <= decision.prompt_tokens
        open_requests.append(planner.begin(prompt, decision.decode[0], next(iter(decision.prefill), None), now))
        for inflight in dice.sample(open_requests, dice.randrange(len(open_requests) + 1)):
            what = dice.choice([planner.prefilled, planner.opened, planner.ended])
            what(inflight, now + dice.random())  # in any order
    for inflight in open_requests:
        planner.ended(inflight, now + 1, dice.randrange(50))
    assert not any(load.pieces for load in planner._decode.values())  # noqa: SLF001
    planner.decide(ids(9), {}, {}, now + 2)
    assert left(planner) == {"prefill": 0, "decode": 0, "pieces": 0}
