"""The simulation's models, computed by hand: steps, queues, links, caches."""

import pytest

from benchmarks.routing.fleet import Fleet, Route, replay
from benchmarks.routing.loads import Load, Request, Segment
from benchmarks.routing.machine import BLOCK_TOKENS, Cache, Hardware

ROUND = Hardware(
    "round numbers",
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


class Fixed:
    """Policy that sends each request to the test's destination, and records the events that a
    router would observe.
    """

    def __init__(self, *routes: Route) -> None:
        self.routes = routes
        self.seen: list[tuple[str, int, float]] = []

    def route(self, request: Request, fleet: Fleet) -> Route:
        return self.routes[request.number]

    def saw(self, what: str, request: Request, fleet: Fleet) -> None:
        self.seen.append((what, request.number, fleet.now))


def ask(number: int, at_s: float, tokens: int, answer: int = 1, after: int | None = None, first: int = 100) -> Request:
    return Request(number, at_s, (Segment(first + number, tokens),), Segment(900 + number, answer), 1.0, after)


def play(*requests: Request, routes, hardware=ROUND, prefill=1, decode=1, **more):
    load = Load("test", hardware, prefill, decode, requests, {}, **more)
    policy = Fixed(*routes)
    outcomes = replay(load, policy, lambda load: Fleet(load.hardware, load.prefill, load.decode, load.factors))
    return outcomes, policy.seen


ALONE, PAIR = Route(0, None), Route(0, 0)


@pytest.mark.parametrize(("tokens", "ttft_s"), [(100, 2.0), (50, 1.5), (250, 2 + 2 + 1.5)])
def test_decode_alone(tokens, ttft_s):
    """Steps have at most a hundred tokens; the last one produces the first token."""
    (one,), _ = play(ask(0, 0.0, tokens), routes=[ALONE])
    assert one.ttft_s == pytest.approx(ttft_s)
    assert (one.decode_s, one.remote, one.computed_tokens) == (0.0, False, tokens)


@pytest.mark.parametrize(
    ("tokens", "ttft_s"),
    [
        # A step of prefill, then 0.1 s for its KV and 0.125 s, then a step of decode.
        (100, 2 + 0.225 + 1.25),
        # The first chunk's KV moves while the second chunk is computed.
        (200, 4 + 0.225 + 1.25),
        (150, 3.5 + 0.05 + 0.125 + 1.25),
    ],
)
def test_a_pair(tokens, ttft_s):
    """The transfer of all but the last chunk overlaps with computation."""
    (one,), seen = play(ask(0, 0.0, tokens), routes=[PAIR])
    assert one.ttft_s == pytest.approx(ttft_s)
    assert one.remote
    assert [what for what, _, _ in seen] == ["prefilled", "kv", "first", "done"]


def test_an_answer_takes_a_step_for_each_token():
    (one,), _ = play(ask(0, 0.0, 100, answer=11), routes=[ALONE])
    assert one.decode_s == pytest.approx(10 * 1.25)


def test_many_steps_at_once_are_as_many():
    """Forty steps are counted sixteen at a time; a request that arrives meanwhile joins at the
    next step.
    """
    (one, two), _ = play(ask(0, 0.0, 100, answer=41), ask(1, 6.9, 50, answer=2), routes=[ALONE, ALONE])
    # It begins decoding at 2 s, so that a step ends at 7 s; then one of 1 + 0.25 + 0.5 s.
    assert two.ttft_s == pytest.approx(0.1 + 1.75)
    assert two.decode_s == pytest.approx(1.5)
    assert one.decode_s == pytest.approx(40 * 1.25 + 0.5 + 0.25)


def test_prompts_share_a_step_first_come_first_served():
    """Sixty and sixty tokens in steps of a hundred: the second request waits for twenty of its
    own.
    """
    (one, two), _ = play(ask(0, 0.0, 60), ask(1, 0.5, 60), routes=[ALONE, ALONE])
    assert one.ttft_s == pytest.approx(1.6)
    assert two.ttft_s == pytest.approx(1.6 - 0.5 + 1.6)
    together, _ = play(ask(0, 0.0, 30), ask(1, 0.1, 80), ask(2, 0.2, 60), routes=[ALONE] * 3)
    # From 1.3 s: 80 + 20 tokens in 2 s, then the other 40 in 1.4 s.
    assert [one.ttft_s for one in together] == pytest.approx([1.3, 3.2, 1.3 + 2 + 1.4 - 0.2])


def test_a_prompt_among_answers_holds_them_up():
    """The step that computes it takes 1 + 0.25 + 0.99 s instead of 1.25 s."""
    (one, _), _ = play(ask(0, 0.0, 100, answer=9), ask(1, 2.0, 99), routes=[ALONE, ALONE])
    assert one.decode_s == pytest.approx(8 * 1.25 + 0.99)


def test_a_link_is_shared():
    """Transfers to both decode engines leave the one prefill engine one after the other."""
    slow = Hardware(**{**vars(ROUND), "link_tokens_per_s": 10.0})
    _, seen = play(ask(0, 0.0, 50), ask(1, 0.0, 50), routes=[Route(0, 0), Route(1, 0)], hardware=slow, decode=2)
    arrived = [at for what, _, at in seen if what == "kv"]
    # The first prompt is computed alone at 1.5 s, because the second arrives just after.
    assert arrived == pytest.approx([1.5 + 5 + 0.125, 1.5 + 5 + 5 + 0.125])


def test_a_cached_prefix_is_not_computed():
    """In the second turn 128 of 160 tokens are cached, in whole blocks of 32."""
    first = Request(0, 0.0, (Segment(1, 100),), Segment(2, 40), 1.0)
    second = Request(1, 1.0, (Segment(1, 100), Segment(2, 40), Segment(3, 20)), Segment(4, 1), 1.0, after=0)
    (_, turn), _ = play(first, second, routes=[ALONE, ALONE])
    assert turn.computed_tokens == 32
    assert turn.ttft_s == pytest.approx(1.32)


def test_kv_that_decode_holds_is_not_moved():
    slow = Hardware(**{**vars(ROUND), "link_tokens_per_s": 10.0})
    first = Request(0, 0.0, (Segment(1, 64),), Segment(2, 1), 1.0)
    second = Request(1, 1.0, (Segment(1, 64), Segment(3, 20)), Segment(4, 1), 1.0, after=0)
    (_, turn), _ = play(first, second, routes=[ALONE, PAIR], hardware=slow)
    assert turn.computed_tokens == 84
    assert turn.ttft_s == pytest.approx(1.84 + 2.0 + 0.125 + 1.25)


def test_an_engine_can_fall_ill():
    (one,), _ = play(ask(0, 1.0, 200), routes=[ALONE], slowdowns=((2.0, "d0", 3.0),))
    assert one.ttft_s == pytest.approx(2 + 3 * 2), "the step that runs is as it was"


def test_a_cache_forgets_the_oldest_and_its_fork_does_not_tell():
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
