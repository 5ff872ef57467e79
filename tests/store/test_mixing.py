"""Time for which a transfer waits for a stored prefix: at most that of the transfer of the same
bytes.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.store.mixing import SAMPLES, MixCosts

MB = 1_000_000


def test_nothing_is_known_yet() -> None:
    """The first prefix is loaded, to measure the costs."""
    costs = MixCosts()
    assert costs.load_s(MB) == 0.0
    assert costs.patience_s(MB) == math.inf


@pytest.mark.parametrize(
    ("load_s", "transfer_s", "patience_s"),
    [
        # Of 10 MB each; for 20 MB.
        (0.01, 0.1, 0.2),
        (0.1, 0.01, 0.0),
        (0.05, 0.05, 0.0),
    ],
)
def test_a_load_that_is_slower_than_the_transfer_is_not_waited_for(
    load_s: float, transfer_s: float, patience_s: float
) -> None:
    costs = MixCosts()
    costs.loaded(10 * MB, load_s)
    costs.transferred(10 * MB, transfer_s)
    assert costs.patience_s(20 * MB) == pytest.approx(patience_s)


def test_the_fastest_transfer_counts_and_all_loads_do() -> None:
    """A transfer's time includes prefill's computation; a load's does not."""
    costs = MixCosts()
    for seconds in (9.0, 1.0, 5.0):
        costs.transferred(10 * MB, seconds)
    for seconds in (1.0, 3.0):
        costs.loaded(10 * MB, seconds)
    assert costs.transfer_s(MB) == pytest.approx(0.1)
    assert costs.load_s(MB) == pytest.approx(0.2)


def test_a_tier_that_has_recovered_is_used_again() -> None:
    """A tier that hung is tried again after as many refusals as there are measurements."""
    costs = MixCosts()
    costs.transferred(MB, 0.001)
    for _ in range(2 * SAMPLES):
        costs.loaded(0, 0.02)
    assert costs.load_s(MB) == math.inf
    assert [costs.patience_s(MB) for _ in range(SAMPLES)] == [0.0] * SAMPLES
    assert costs.patience_s(MB) == pytest.approx(0.001)


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(1e-6, 100.0)), max_size=40),
    st.lists(st.tuples(st.integers(1, 10**9), st.floats(1e-6, 100.0)), min_size=1, max_size=40),
    st.integers(1, 10**9),
)
def test_the_wait_is_at_most_the_transfer(
    loads: list[tuple[int, float]], transfers: list[tuple[int, float]], size_bytes: int
) -> None:
    costs = MixCosts()
    for size, seconds in loads:
        costs.loaded(size, seconds)
    for size, seconds in transfers:
        costs.transferred(size, seconds)
    expected = costs.load_s(size_bytes)
    patience_s = costs.patience_s(size_bytes)
    assert patience_s in (0.0, costs.transfer_s(size_bytes))
    assert (patience_s > 0) == (expected < costs.transfer_s(size_bytes))
