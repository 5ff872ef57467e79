"""Whether a request loads stored KV, and how long it waits for it."""

from __future__ import annotations

import copy
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.store.load_costs import LOADS, TRY_AGAIN_AFTER, LoadCosts

MB = 1_000_000
DISK = "disk"


def takes(costs: LoadCosts, sizes: dict[str, int], seconds: float) -> bool:
    """Return whether a load is estimated to take this time: what takes longer is not waited for."""
    below, above = (0.0, 1e-12) if not seconds else (min(0.999 * seconds, 1e9), 1.001 * seconds)
    answers = [copy.deepcopy(costs).patience_s(sizes, otherwise_s) for otherwise_s in (below, above)]
    return answers == [0.0, above]


def test_nothing_is_known_yet() -> None:
    """The first prefix is loaded, to measure the costs."""
    costs = LoadCosts()
    assert takes(costs, {DISK: MB}, 0.0)
    assert costs.transfer_s(MB) == math.inf
    assert costs.compute_s(0, 1000) == math.inf
    assert costs.patience_s({DISK: MB}, costs.transfer_s(MB)) == math.inf


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


@given(
    st.lists(st.tuples(st.sampled_from(["memory", DISK]), st.integers(0, 10**9), st.floats(1e-6, 100.0)), max_size=40),
    st.dictionaries(st.sampled_from(["memory", DISK]), st.integers(1, 10**9), min_size=1),
    st.floats(1e-6, 100.0),
)
def test_the_wait_is_at_most_the_time_without_the_store(
    loads: list[tuple[str, int, float]], sizes: dict[str, int], otherwise_s: float
) -> None:
    costs = LoadCosts()
    for tier, size, seconds in loads:
        costs.read(tier, size, seconds)
    costs.copied(MB, 1e-6)
    rates = {name: [s / size if size else math.inf for tier, size, s in loads if tier == name] for name in sizes}
    reads = [size * statistics.median_high(rates[name][-LOADS:]) for name, size in sizes.items() if rates[name]]
    expected_s = max(reads, default=0.0) + sum(sizes.values()) * (1e-6 / MB)
    assert costs.patience_s(sizes, otherwise_s) == (otherwise_s if expected_s < otherwise_s else 0.0)
