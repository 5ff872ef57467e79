"""Costs learnt from measurements."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.policy.costs import FEW, FIT_EVERY_S, MOST_WAITING, OUTLIER, Level, Levels, Regression


@pytest.mark.parametrize(
    ("ratios", "later_s", "factor"),
    [
        ([], 0.0, 1.0),
        ([8.0], 0.0, 8 ** (1 / 1.1)),  # one measurement against a tenth of one
        ([4.0, 4.0], 0.0, 4 ** (1.98 / 2.08)),  # the first counts 0.98 by now
        ([2.0, 8.0], 0.0, math.exp((math.log(2) * 0.98 + math.log(8)) / 1.98 * (1.98 / 2.08))),
        # After ln(10) times its fading time, one measurement has the weight of the assumption.
        ([16.0], 60 * math.log(10), 4.0),
        ([16.0], 6000.0, 1.0),
    ],
)
def test_a_level_by_hand(ratios, later_s, factor):
    level = Level(60)
    for ratio in ratios:
        level.observe(0.5, 0.5 * ratio, 10.0)
    assert level.factor(10.0 + later_s) == pytest.approx(factor, abs=1e-6)


def test_an_outlier_moves_a_level_little_and_a_lasting_change_much():
    """A thousandfold measurement counts as a fourfold one; repeated ones become the estimate."""
    level = Level(1e9)
    for _ in range(9):
        level.observe(1.0, 1.0, 0.0)
    assert level.observe(1.0, 1000.0, 0.0) == pytest.approx(OUTLIER)
    assert 1.0 < level.factor(0.0) < OUTLIER ** (1 / 9)
    for _ in range(300):
        level.observe(1.0, 100.0, 0.0)
    assert level.factor(0.0) == pytest.approx(100, rel=0.2)


@given(st.lists(st.tuples(*[st.sampled_from("abcd")] * 2, st.floats(0.01, 100), st.floats(0, 90)), max_size=30))
def test_levels_are_those_of_each_pair(seen):
    """The array has the factor of each pair, at any time; removed names have none."""
    levels, now = Levels(60), 0.0
    singly: dict[tuple[str, str], Level] = {}
    for row, column, ratio, later in seen:
        now += later
        levels.observe(row, column, 1.0, ratio, now)
        singly.setdefault((row, column), Level(60)).observe(1.0, ratio, now)
    for rows, columns in (("abcd", "dcba"), ("ab", "bcd")):
        levels.keep_only(set(rows), set(columns))
        for at in (now - 5, now, now + 100):
            wanted = [
                [singly.get((row, column), Level(60)).factor(at) if row in rows and column in columns else 1.0
                 for column in "abcd"] for row in "abcd"
            ]  # fmt: skip
            assert levels.factors("abcd", "abcd", at).tolist() == [pytest.approx(row) for row in wanted]
            assert [[levels.factor(row, column, at) for column in "abcd"] for row in "abcd"] == wanted


@pytest.mark.parametrize(
    ("work", "factors"),
    [
        ([], (1, 1)),
        # 3 x the first part and half of the second; two kinds of work show it.
        ([((0.1, 0.01), 0.305), ((0.1, 2.0), 1.3)] * 100, (3, 0.5)),
        # A part without measurements is as much slower than assumed as the other one.
        ([((0.1, 0.0), 10.0)] * 20, (100, 100)),
        # The second part seems to make work faster: then its cost is zero. Errors are relative, so
        # that (f - 2)^2 + (f / 2 - 1 / 2)^2 is least.
        ([((1.0, 0.0), 2.0), ((1.0, 1.0), 1.0)] * 50, (1.8, 0)),
        # Work of zero cost is ignored, however long it took: it made the equations singular.
        ([((1.0, 1.0), 2.0), ((0.0, 0.0), 240.0)], (1, 1)),
    ],
)
def test_a_regression_by_hand(work, factors):
    regression = Regression(2, 1e9)
    for parts, seconds in work:
        regression.observe(parts, seconds, 0.0)
    assert regression.factors(1.0) == pytest.approx(factors, rel=0.05, abs=0.01)
    assert regression.predict((0.25, 0.5), 1.0) == pytest.approx(0.25 * factors[0] + 0.5 * factors[1], rel=0.05)


def test_a_regression_fades():
    regression = Regression(2, 60)
    for _ in range(30):
        regression.observe((0.1, 0.1), 2.0, 0.0)
    assert regression.predict((0.1, 0.1), 0.0) == pytest.approx(2.0, rel=0.01)
    assert regression.predict((0.1, 0.1), 6000.0) == pytest.approx(0.2, rel=0.01)


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
    together, singly, now = Regression(2, 60), Regression(2, 60), 0.0
    for first, second, ratio, wait_s in work:
        now += wait_s / 1000
        together.observe((first, second), (first + second) * ratio, now)
        singly.observe((first, second), (first + second) * ratio, now)
        singly.fit(now)
    for later in (FIT_EVERY_S * 1.01, 60.0, 1800.0):
        assert together.factors(now + later) == pytest.approx(singly.factors(now + later), rel=1e-6)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.floats(1e-4, 10), st.floats(0, 10), st.floats(0, 10)), min_size=30, max_size=60),
    st.tuples(st.floats(0.05, 20), st.floats(0.05, 20), st.floats(0.05, 20)),
    st.integers(0, 2**32),
)
def test_what_is_exact_is_learnt(work, truth, seed):
    """Half of the measured cases are predicted within a third, despite occasional outliers."""
    dice = random.Random(seed)
    regression = Regression(3, 1e9)
    exact = [sum(a * b for a, b in zip(truth, parts, strict=True)) for parts in work]
    for turn in range(10):
        for parts, seconds in zip(work, exact, strict=True):
            wild = dice.random() < 0.05 and turn
            regression.observe(parts, seconds * (dice.choice([0.01, 100.0]) if wild else 1), 0.0)
    errors = [abs(math.log(regression.predict(p, 0.0) / s)) for p, s in zip(work, exact, strict=True)]
    assert sorted(errors)[len(errors) // 2] < math.log(1.35)


two_parts = st.tuples(st.floats(0, 1e6), st.floats(0, 1e6))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(two_parts, st.floats(0, 1e9), st.floats(0, 1e6)), max_size=40), two_parts)
def test_predictions_stay_sane(seen, asked):
    """No measurement, however extreme, makes a prediction negative, infinite or NaN."""
    regression, now = Regression(2, 60.0), 0.0
    for parts, seconds, later in seen:
        now += later
        regression.observe(parts, seconds, now)
    assert 0 <= regression.predict(asked, now) < math.inf
