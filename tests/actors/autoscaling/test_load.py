"""An engine's load from its finished work: by hand with long windows, then with fading."""

from math import exp

import pytest

from actors.autoscaling.load import Fading, LoadMeter

LONG_S = 1e9


def test_old_amounts_count_less():
    """One window later, 1/e of the old rate is left."""
    fading = Fading(10)
    fading.add(100, 0)
    assert fading.value(10) == pytest.approx(100 * exp(-1))
    fading.add(50, 10)
    assert fading.value(20) == pytest.approx(100 * exp(-2) + 50 * exp(-1))


@pytest.mark.parametrize(
    ("began_s", "window_s", "prompts", "at_s", "load"),
    [
        # 600 tokens in 3 s of computation, 10 s after the start.
        (0, LONG_S, [(200, 1, 2), (400, 2, 8)], 10, (60, 200, 300)),
        # Two share 2 s of the engine; a third one began at 4, and is alone from 5.
        (0, LONG_S, [(300, 2, 5), (300, 2, 5), (300, 2, 6)], 10, (90, 300, 300)),
        # An engine that has been idle for an hour keeps its rate and loses its throughput.
        (0, 15, [(1000, 2, 3)], 3600, (0, 500, 1000)),
        # A young engine's throughput is over its age, not over a whole window.
        (100, 15, [(100, 0.1, 100 + tenth / 10) for tenth in range(1, 11)], 101, (1000, 1000, 100)),
        # After three windows of busy time at the new rate, a twentieth of the old one is left.
        (0, 15, [(1000 if s < 60 else 100, 1, s + 1) for s in range(105)], 105, (145, 145, 145)),
    ],
)
def test_prompts(began_s, window_s, prompts, at_s, load):
    meter = LoadMeter(began_s, window_s)
    for tokens, computing_s, now_s in prompts:
        meter.prompt(tokens, computing_s, now_s)
    read = meter.read(at_s)
    found = read["tokens_per_s"], read["tokens_per_busy_s"], read["prompt_tokens"]
    assert found == pytest.approx(load, rel=0.05, abs=1e-9)


def test_tokens_of_two_sequences():
    """Four gaps of 0.5 s in 4 s: half a sequence at a time, on average."""
    load = LoadMeter(0, LONG_S)
    for now_s in (1, 1, 1.5, 1.5):
        load.tokens(0.5, now_s)
    assert (load.read(4)["tpot_s"], load.read(4)["decoding"]) == pytest.approx((0.5, 0.5))


def test_values_without_a_measurement_are_left_out():
    """A zero would lower Serve's mean."""
    assert LoadMeter(0).read(5) == {"tokens_per_s": 0.0, "decoding": 0.0}
