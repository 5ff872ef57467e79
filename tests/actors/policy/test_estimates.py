"""Costs learnt from measurements."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policy.estimates import ASSUMED_WEIGHT, FEW, FIT_EVERY_S, MOST_WAITING, OUTLIER, Level, Regression


def test_a_level_is_one_before_anything_is_measured():
    assert Level(60).factor(0.0) == 1.0
    assert Level(60).factor(1e9) == 1.0


@pytest.mark.parametrize(
    ("ratios", "factor"),
    [
        ([8.0], 8 ** (1 / 1.1)),  # one measurement against a tenth of one
        ([4.0, 4.0], 4 ** (1.98 / 2.08)),  # the first counts 0.98 by now
        ([2.0, 8.0], math.exp((math.log(2) * 0.98 + math.log(8)) / 1.98 * (1.98 / 2.08))),
    ],
)
def test_a_level_by_hand(ratios, factor):
    level = Level(60)
    for ratio in ratios:
        level.observe(0.5, 0.5 * ratio, 10.0)
    assert level.factor(10.0) == pytest.approx(factor)
    assert ASSUMED_WEIGHT == 0.1


def test_a_level_fades():
    """After ln(10) times its fading time, one measurement has the weight of the assumption."""
    level = Level(60)
    level.observe(1.0, 16.0, 0.0)
    assert level.factor(60 * math.log(10)) == pytest.approx(4.0)
    assert level.factor(6000) == pytest.approx(1.0, abs=1e-6)


def test_an_outlier_moves_a_level_little():
    """A thousandfold measurement counts as a fourfold one."""
    level = Level(1e9)
    for _ in range(9):
        level.observe(1.0, 1.0, 0.0)
    assert level.observe(1.0, 1000.0, 0.0) == pytest.approx(OUTLIER)
    assert 1.0 < level.factor(0.0) < OUTLIER ** (1 / 9)


def test_a_lasting_change_is_learnt():
    """Repeated outliers become the estimate."""
    level = Level(1e9)
    for _ in range(50):
        level.observe(1.0, 1.0, 0.0)
    for _ in range(300):
        level.observe(1.0, 100.0, 0.0)
    assert level.factor(0.0) == pytest.approx(100, rel=0.2)


def test_a_regression_assumes_before_it_knows():
    assert Regression(2, 60).predict((0.25, 0.5), 0.0) == 0.75


def test_a_regression_tells_the_parts_apart():
    """True cost: 3 x the first part and half of the second; two kinds of work show it."""
    regression = Regression(2, 1e9)
    for turn in range(200):
        parts = (0.1, 0.01) if turn % 2 else (0.1, 2.0)
        regression.observe(parts, 3 * parts[0] + 0.5 * parts[1], 0.0)
    assert regression.factors(0.0) == pytest.approx((3, 0.5), rel=0.05)
    assert regression.predict((0.1, 1.0), 0.0) == pytest.approx(0.8, rel=0.05)


def test_a_part_that_is_never_seen_follows_the_others():
    """On a machine a hundred times slower than assumed, a part without measurements is slower as
    well.
    """
    regression = Regression(2, 1e9)
    for turn in range(20):
        regression.observe((0.1, 0.0), 10.0, float(turn))
    assert regression.factors(20.0) == pytest.approx((100, 100), rel=0.05)


def test_no_part_is_negative():
    """The second part seems to make work faster: then its cost is zero."""
    regression = Regression(2, 1e9)
    for turn in range(100):
        parts = (1.0, 1.0) if turn % 2 else (1.0, 0.0)
        regression.observe(parts, 1.0 if turn % 2 else 2.0, 0.0)
    first, second = regression.factors(0.0)
    assert second == pytest.approx(0.0, abs=0.01)
    assert 1.0 < first < 2.0


def test_no_work_teaches_nothing():
    """Zero work is ignored, however long it took.

    Regression, found by the property below: it made all other parts free, and the equations
    singular.
    """
    regression = Regression(2, 60)
    regression.observe((1.0, 1.0), 2.0, 0.0)
    regression.observe((0.0, 0.0), 240.0, 1.0)
    assert regression.predict((1.0, 1.0), 1.0) == pytest.approx(2.0)


def test_a_burst_is_fitted_once():
    """After FEW measurements a fit waits for FIT_EVERY_S, another measurement or a query."""
    regression = Regression(2, 1e9)
    for _ in range(int(FEW) + 1):
        regression.observe((0.1, 0.1), 0.2, 5.0)
    before = regression.factors(5.0)
    for turn in range(5):
        regression.observe((0.1, 0.1), 0.6, 5.0 + FIT_EVERY_S * turn / 5)
        assert regression.factors(5.0 + FIT_EVERY_S * turn / 5) == pytest.approx(before)
    asked = regression.factors(5.0 + FIT_EVERY_S * 1.01)
    assert asked[0] > before[0] * 1.1
    for _ in range(MOST_WAITING):
        regression.observe((0.1, 0.1), 0.6, 5.0 + FIT_EVERY_S * 1.02)
    assert regression.factors(5.0 + FIT_EVERY_S * 1.02)[0] > asked[0] * 1.1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.floats(1e-3, 10), st.floats(0, 10), st.floats(0.5, 2), st.floats(0, 40)), max_size=80))
def test_measurements_that_are_fitted_together_count_as_one_by_one(work):
    """Older measurements count less, by number and age."""
    together, singly = Regression(2, 60), Regression(2, 60)
    now = 0.0
    for first, second, ratio, wait_s in work:
        now += wait_s / 1000
        together.observe((first, second), (first + second) * ratio, now)
        singly.observe((first, second), (first + second) * ratio, now)
        singly.fit(now)
    for later in (FIT_EVERY_S * 1.01, 60.0, 1800.0):
        assert together.factors(now + later) == pytest.approx(singly.factors(now + later), rel=1e-6)


def test_a_burst_that_is_fitted_late_counts_as_it_was():
    """Measurements fitted together and late give the same factors as fits at their times."""
    together, singly = Regression(2, 600), Regression(2, 600)
    for turn in range(30):
        parts = (0.1, 0.01) if turn % 2 else (0.1, 0.0)
        for regression in (together, singly):
            regression.observe(parts, 100 * sum(parts), turn / 1000)
        singly.fit(turn / 1000)
    assert together.waiting
    assert together.factors(3000.0) == pytest.approx(singly.factors(3000.0), rel=1e-6)


def test_a_regression_fades():
    regression = Regression(2, 60)
    for _ in range(30):
        regression.observe((0.1, 0.1), 2.0, 0.0)
    assert regression.predict((0.1, 0.1), 0.0) == pytest.approx(2.0, rel=0.01)
    assert regression.predict((0.1, 0.1), 6000.0) == pytest.approx(0.2, rel=0.01)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.floats(1e-4, 10), st.floats(0, 10), st.floats(0, 10)), min_size=30, max_size=60),
    st.tuples(st.floats(0.05, 20), st.floats(0.05, 20), st.floats(0.05, 20)),
    st.integers(0, 2**32),
)
def test_what_is_exact_is_learnt(work, truth, seed):
    """For any work, half of the measured cases are predicted within a third, despite occasional
    outliers.
    """
    dice = random.Random(seed)
    regression = Regression(3, 1e9)
    exact = [sum(a * b for a, b in zip(truth, parts, strict=True)) for parts in work]
    for turn in range(10):
        for parts, seconds in zip(work, exact, strict=True):
            wild = dice.random() < 0.05 and turn
            regression.observe(parts, seconds * (dice.choice([0.01, 100.0]) if wild else 1), 0.0)
    errors = [abs(math.log(regression.predict(p, 0.0) / s)) for p, s in zip(work, exact, strict=True)]
    assert sorted(errors)[len(errors) // 2] < math.log(1.35)


@settings(deadline=None, max_examples=300)
@given(
    st.lists(
        st.tuples(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), st.floats(0, 1e9), st.floats(0, 1e6)), max_size=40
    ),
    st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)),
)
def test_predictions_stay_sane(seen, asked):
    """No measurement, however extreme, makes a prediction negative, infinite or NaN."""
    regression = Regression(2, 60.0)
    now = 0.0
    for parts, seconds, later in seen:
        now += later
        regression.observe(parts, seconds, now)
    assert 0 <= regression.predict(asked, now) < math.inf
