"""Which requests may wait, for how long, and when refused ones return."""

import random

import pytest

from actors.policy.admission import (
    FEWEST_RELEASES,
    LEAST_WAIT_S,
    MOST_RETRY_S,
    SAFE_SHARE,
    KvCache,
    Returns,
    ServiceRate,
    longest_wait_s,
)
from actors.policy.choice import Estimate

ONE = Estimate("d", "p", 100, 0, 100, queue_s=9.0, compute_s=1.0, handover_s=0.5, decoding_s=4.0, interference_s=0.0)
BEGINS_S = 1.5


@pytest.mark.parametrize(
    ("arguments", "wait_s"),
    [
        ((None, 10.0), SAFE_SHARE * 10),
        ((ONE, 10.0), SAFE_SHARE * 10 - BEGINS_S),
        ((ONE, 10.0, None, True), SAFE_SHARE * 5 - BEGINS_S),  # the key has more than its share
        ((ONE, 10.0, 600.0), SAFE_SHARE * 10 - BEGINS_S),  # more time does not fill the queue
        ((ONE, 10.0, 33.0), SAFE_SHARE * 33 - BEGINS_S - 12),  # an answer three times as long
        ((ONE, 1.0), LEAST_WAIT_S),
        ((ONE, 10.0, 20.0), LEAST_WAIT_S),
    ],
)
def test_the_longest_wait(arguments, wait_s):
    assert longest_wait_s(*arguments) == pytest.approx(wait_s)


BUSY = [(0, True, 10.0), *((100, True, 11.0 + n) for n in range(20))]
"""100 tokens per second until 30.0, while requests wait."""


def test_each_answer_has_a_state_of_its_own():
    cache = KvCache(8000, 100, ((128, 0), (4096, 4096)))
    assert [cache.share(900, 0, answers) for answers in (1, 8)] == [80 * (8 + 1), 80 * (8 + 8)]


@pytest.mark.parametrize(
    ("events", "at", "wait_s"),
    [
        ([], 10.0, 0.0),
        ([(100, False, 10.0 + n) for n in range(20)], 30.0, 0.0),  # nobody waited
        (BUSY[:FEWEST_RELEASES], 18.0, 0.0),  # too few
        (BUSY, 30.0, 10.0),
        ([*BUSY, (0, False, 30.0)], 59.0, 10.0),
        ([*BUSY, (0, False, 30.0), (0, True, 9e9)], 9e9, 10.0),
        # Engines that become slower
        ([(0, True, 0.0), *((100, True, 1.0 + n) for n in range(20)), (100, True, 500.0)], 500.0, 4800.0),
        # Two minutes without a release
        ([*BUSY, *((0, True, 30.0 + n) for n in range(120))], 150.0, 91.0),
        # Those that waited have timed out: then no measurement would end the refusals
        ([*BUSY, (0, False, 630.0), (100, False, 640.0)], 661.0, 0.0),
        # Engines have released since: the stall is over
        ([*BUSY, (0, False, 630.0), (100, False, 640.0), (0, True, 661.0)], 661.0, 10.0),
    ],
)
def test_the_wait_follows_what_engines_release_while_requests_wait(events, at, wait_s):
    rate = ServiceRate()
    for tokens, waiting, now in events:
        rate.observe(tokens, waiting, now)
    assert rate.wait_s(1000, at) == pytest.approx(wait_s, rel=0.1)


def test_refused_requests_return_one_after_the_other():
    """Each has the time that the engines need for it; the longest is what clients accept."""
    returns, dice = Returns(), random.Random(1)
    assert [returns.retry_s(2.0, 0.5, 100.0) for _ in range(5)] == [2.5, 4.5, 6.5, 8.5, 10.5]
    returns.forget()
    assert returns.retry_s(2.0, 0.5, 100.0) == 2.5, "without a queue"
    now = 200.0
    for _ in range(1000):
        now += dice.random()
        late_s = dice.expovariate(0.1)
        assert late_s <= returns.retry_s(dice.expovariate(0.5), late_s, now) <= max(MOST_RETRY_S, late_s) + 1e-9
