"""The simulation's models, computed by hand: steps, queues, links, caches."""

from dataclasses import replace

import pytest

from benchmarks.routing.fleet import Fleet, Route, replay
from benchmarks.routing.loads import Load, Request, Segment
from benchmarks.routing.machine import BLOCK_TOKENS, Cache, Hardware

ROUND = Hardware(
    step_s=1.0,
    prefill_token_s=0.01,
    attention_s=0.0,
    decode_sequence_s=0.25,
    decode_context_token_s=0.0,
    budget_tokens=100,
    max_sequences=4,
    cache_tokens=10 * BLOCK_TOKENS,
    link_tokens_per_s=1000.0,
    link_overhead_s=0.125,
)
"""A hundred tokens of a prompt take a step of 2 s; a step of n answers takes 1 + n/4 s."""

SLOW_LINK = replace(ROUND, link_tokens_per_s=10.0)
ALONE, PAIR = Route(0, None), Route(0, 0)


class Fixed:
    """Policy that sends each request to the test's destination, and records what it observes."""

    def __init__(self, routes: list[Route]) -> None:
        self.routes = routes
        self.seen: list[tuple[str, int, float]] = []

    def route(self, request: Request, fleet: Fleet) -> Route:
        return self.routes[request.number]

    def saw(self, what: str, request: Request, fleet: Fleet) -> None:
        self.seen.append((what, request.number, fleet.now))


def ask(number: int, at_s: float, tokens: int, answer: int = 1) -> Request:
    return Request(number, at_s, (Segment(100 + number, tokens),), Segment(900 + number, answer), 1.0)


def play(*requests: Request, routes, hardware=ROUND, decode=1, **more):
    policy = Fixed(routes)
    return replay(Load("test", hardware, 1, decode, requests, {}, **more), policy), policy.seen


@pytest.mark.parametrize(
    ("route", "tokens", "ttft_s"),
    [
        # Steps have at most a hundred tokens; the last one produces the first token.
        (ALONE, 100, 2.0),
        (ALONE, 50, 1.5),
        (ALONE, 250, 2 + 2 + 1.5),
        # A step of prefill, then 0.1 s for its KV and 0.125 s, then a step of decode.
        (PAIR, 100, 2 + 0.225 + 1.25),
        # The first chunk's KV moves while the second chunk is computed.
        (PAIR, 200, 4 + 0.225 + 1.25),
        (PAIR, 150, 3.5 + 0.05 + 0.125 + 1.25),
    ],
)
def test_one_prompt(route, tokens, ttft_s):
    (one,), seen = play(ask(0, 0.0, tokens), routes=[route])
    assert one.ttft_s == pytest.approx(ttft_s)
    assert (one.decode_s, one.remote, one.computed_tokens) == (0.0, route == PAIR, tokens)
    assert [what for what, _, _ in seen] == ["prefilled", "kv", "first", "done"][0 if one.remote else 2 :]


@pytest.mark.parametrize(
    ("requests", "ttft_s", "decode_s"),
    [
        ([ask(0, 0.0, 100, answer=11)], [2.0], [10 * 1.25]),
        # Forty steps are counted sixteen at a time; a request that arrives meanwhile joins at the
        # next step, which ends at 7 s; then one of 1 + 0.25 + 0.5 s.
        ([ask(0, 0.0, 100, answer=41), ask(1, 6.9, 50, answer=2)], [2.0, 0.1 + 1.75], [40 * 1.25 + 0.75, 1.5]),
        # Sixty and sixty tokens in steps of a hundred: the second waits for twenty of its own.
        ([ask(0, 0.0, 60), ask(1, 0.5, 60)], [1.6, 1.6 - 0.5 + 1.6], [0, 0]),
        # From 1.3 s: 80 + 20 tokens in 2 s, then the other 40 in 1.4 s.
        ([ask(0, 0.0, 30), ask(1, 0.1, 80), ask(2, 0.2, 60)], [1.3, 3.2, 1.3 + 2 + 1.4 - 0.2], [0, 0, 0]),
        # The step that computes a prompt among answers takes 1 + 0.25 + 0.99 s instead of 1.25 s.
        ([ask(0, 0.0, 100, answer=9), ask(1, 2.0, 99)], [2.0, 1.25 + 2.24], [8 * 1.25 + 0.99, 0]),
    ],
)
def test_steps_are_shared(requests, ttft_s, decode_s):
    outcomes, _ = play(*requests, routes=[ALONE] * 3)
    assert [one.ttft_s for one in outcomes] == pytest.approx(ttft_s)
    assert [one.decode_s for one in outcomes] == pytest.approx(decode_s)


def test_a_link_is_shared():
    """Transfers to both decode engines leave the one prefill engine one after the other."""
    routes = [Route(0, 0), Route(1, 0)]
    _, seen = play(ask(0, 0.0, 50), ask(1, 0.0, 50), routes=routes, hardware=SLOW_LINK, decode=2)
    # The first prompt is computed alone at 1.5 s, because the second arrives just after.
    arrived = [at for what, _, at in seen if what == "kv"]
    assert arrived == pytest.approx([1.5 + 5 + 0.125, 1.5 + 5 + 5 + 0.125])


@pytest.mark.parametrize(
    ("route", "tokens", "computed", "ttft_s"),
    [
        (ALONE, 20, 32, 1.32),  # 128 of 160 tokens are cached, in whole blocks of 32
        (PAIR, 16, 156, 2 + 1.56 + 2.8 + 0.125 + 1.25),  # KV that decode has is not moved
    ],
)
def test_a_cached_prefix(route, tokens, computed, ttft_s):
    first = Request(0, 0.0, (Segment(1, 100),), Segment(2, 40), 1.0)
    second = Request(1, 1.0, (Segment(1, 100), Segment(2, 40), Segment(3, tokens)), Segment(4, 1), 1.0, after=0)
    (_, turn), _ = play(first, second, routes=[ALONE, route], hardware=SLOW_LINK)
    assert turn.computed_tokens == computed
    assert turn.ttft_s == pytest.approx(ttft_s)


def test_an_engine_can_become_slow():
    (one,), _ = play(ask(0, 1.0, 200), routes=[ALONE], slowdowns=((2.0, "d0", 3.0),))
    assert one.ttft_s == pytest.approx(2 + 3 * 2), "the step that runs is as it was"


def test_a_cache_drops_the_oldest_and_a_fork_does_not_change_it():
    cache = Cache(3)
    cache.add([1, 2])
    cache.add([7, 8])
    assert cache.held_tokens([7, 8]) == 2 * BLOCK_TOKENS
    assert cache.held_tokens([1, 2]) == BLOCK_TOKENS
    fork = cache.fork()
    fork.add([9])
    assert fork.held_tokens([9]) == BLOCK_TOKENS
    assert fork.held_tokens([7, 8, 9]) == 3 * BLOCK_TOKENS
    assert cache.held_tokens([9]) == 0
