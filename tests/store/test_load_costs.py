"""Whether a request loads stored KV, and how long it waits for it."""

from __future__ import annotations

import math

import pytest

from connectors.store.load_costs import LOADS, TRY_AGAIN_AFTER, LoadCosts

MB = 1_000_000
DISK = "disk"


def test_nothing_is_known_yet() -> None:
    """The first prefix is loaded, to measure the costs."""
    costs = LoadCosts()
    assert costs.transfer_s(MB) == costs.compute_s(0, 1000) == math.inf
    assert [costs.patience_s({DISK: MB}, other_s) for other_s in (1e-9, math.inf)] == [1e-9, math.inf]


def test_a_load_takes_the_time_of_the_slowest_tier_and_of_all_copies() -> None:
    """By medians of the latest ones: 2 s of disk beside 1 s of memory, and 3 s of copies."""
    costs = LoadCosts()
    for tier in ("memory", DISK):
        for seconds in (50.0, *[1.0] * (LOADS - 1), 50.0):
            costs.read(tier, MB, seconds)
    costs.read(DISK, 0, 9.0)
    costs.copied(MB, 1.0)
    sizes = {"memory": MB, DISK: 2 * MB}
    assert [costs.patience_s(sizes, other_s) for other_s in (4.99, 5.01)] == [0.0, 5.01]


def test_late_tokens_of_a_prompt_cost_more() -> None:
    """1 ms a token, and 1 microsecond for each token of context: 1,000 tokens cost 1.5 s, the
    next 1,000 cost 2.5 s. A pause of the machine does not count.
    """
    costs = LoadCosts()
    for context in (100, 500, 900, 1300):
        costs.computed(200, context, 200 * (1e-3 + 1e-6 * context))
    costs.computed(200, 700, 90.0)
    assert costs.compute_s(0, 1000) == pytest.approx(1.5)
    assert costs.compute_s(1000, 2000) == pytest.approx(2.5)


@pytest.mark.parametrize(("load_s", "loads"), [(0.02, 1), (0.001, 10)])
def test_a_slow_tier_is_tried_again(load_s: float, loads: int) -> None:
    """By one request. A tier that has recovered is then used, also its copies."""
    costs = LoadCosts()
    for _ in range(LOADS):
        costs.read(DISK, 0, 0.02)
        costs.copied(MB, 0.02)
    tried = [costs.patience_s({DISK: MB}, 0.01) for _ in range(TRY_AGAIN_AFTER + 10)]
    assert tried == [0.0] * (TRY_AGAIN_AFTER - 1) + [0.01] + [0.0] * 10
    found = 0
    while True:
        costs.read(DISK, MB, load_s)
        found += 1
        if found == 10 or not costs.patience_s({DISK: MB}, 0.01):
            break
    assert found == loads
