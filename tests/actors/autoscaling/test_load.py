"""An engine's load from its finished work: by hand with long windows, then with fading."""

from math import exp

import pytest

from actors.autoscaling.load import Fading, LoadMeter

LONG_S = 1e9


def test_what_is_older_counts_less():
    """One window later, 1/e of the old rate is left."""
    fading = Fading(10)
    fading.add(100, 0)
    assert fading.value(10) == pytest.approx(100 * exp(-1))
    fading.add(50, 10)
    assert fading.value(20) == pytest.approx(100 * exp(-2) + 50 * exp(-1))


def test_prompts_one_after_the_other():
    """An engine has computed 600 tokens in 3 s of computation, 10 s after its start."""
    load = LoadMeter(0, LONG_S)
    load.prompt(200, 1, 2)
    load.prompt(400, 2, 8)
    read = load.read(10)
    assert read["tokens_per_s"] == pytest.approx(60)
    assert read["tokens_per_busy_s"] == pytest.approx(200)
    assert read["prompt_tokens"] == pytest.approx(300)


def test_prompts_beside_each_other():
    """Two prompts that share 2 s of the engine: the rate counts both."""
    load = LoadMeter(0, LONG_S)
    load.prompt(300, 2, 5)
    load.prompt(300, 2, 5)
    load.prompt(300, 2, 6)  # began at 4; until 5 the engine also computed the others
    assert load.read(10)["tokens_per_busy_s"] == pytest.approx(300)


def test_an_idle_engine_keeps_its_rate_and_loses_its_throughput():
    """The engine has been idle for an hour."""
    load = LoadMeter(0, 15)
    load.prompt(1000, 2, 3)
    assert load.read(3600)["tokens_per_busy_s"] == pytest.approx(500)
    assert load.read(3600)["tokens_per_s"] == pytest.approx(0, abs=1e-9)


def test_a_rate_that_changes_is_found_again():
    """After three windows of busy time at the new rate, a twentieth of the old one is left."""
    load = LoadMeter(0, 15)
    for second in range(60):
        load.prompt(1000, 1, second + 1)
    for second in range(60, 105):
        load.prompt(100, 1, second + 1)
    assert load.read(105)["tokens_per_busy_s"] == pytest.approx(100 + 900 * exp(-3), rel=0.01)


def test_tokens_of_two_sequences():
    """Four gaps of 0.5 s in 4 s: half a sequence at a time, on average."""
    load = LoadMeter(0, LONG_S)
    for now_s in (1, 1, 1.5, 1.5):
        load.tokens(0.5, now_s)
    read = load.read(4)
    assert read["tpot_s"] == pytest.approx(0.5)
    assert read["decoding"] == pytest.approx(0.5)


def test_a_young_engine_is_not_taken_for_an_idle_one():
    """A young engine's throughput is over its age, not over a whole window."""
    load = LoadMeter(100, 15)
    for tenth in range(1, 11):
        load.prompt(100, 0.1, 100 + tenth / 10)
    assert load.read(101)["tokens_per_s"] == pytest.approx(1000, rel=0.05)


def test_what_has_not_been_measured_is_left_out():
    """Values without a measurement are omitted: a zero would lower Serve's mean."""
    assert LoadMeter(0).read(5) == {"tokens_per_s": 0.0, "decoding": 0.0}
