"""Engines of each role: tables computed by hand, then properties for any load."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.autoscaling.replica_counts import (
    Bounds,
    DecodeLoad,
    PrefillLoad,
    decode_need,
    prefill_need,
    settle,
    together,
)
from configs.settings.base import SettingsError
from configs.settings.parsing import parse_scaling
from configs.settings.scaling import ScalingSettings

EVEN = ScalingSettings(prefill_busy=0.5, catch_up_s=10, kv_use=0.5, tpot_s=0.05, slack=0.2)
"""Targets that are easy to divide by."""

BUSY = PrefillLoad(queued_tokens=0, tokens_per_s=1000, tokens_per_busy_s=2000, prompt_tokens=500)


@pytest.mark.parametrize(
    ("loads", "queued_requests", "need"),
    [
        # 1,000 tokens/s of an engine whose target is 2,000 x 0.5: one engine.
        ([BUSY], 0, 1.0),
        ([BUSY, BUSY], 0, 2.0),
        # A new replica without a measurement adds no capacity and no rate.
        ([BUSY, PrefillLoad()], 0, 1.0),
        # 10,000 tokens wait, to be computed in 10 s beside the 1,000/s that arrive.
        ([PrefillLoad(10_000, 1000, 2000, 500)], 0, 2.0),
        # 20 prompts of 500 tokens wait in routers: 10,000 tokens again.
        ([BUSY], 20, 2.0),
        # Unequal engines: 3,000 tokens/s over a mean rate of 3,000 x 0.5.
        ([PrefillLoad(0, 1000, 2000, 500), PrefillLoad(0, 2000, 4000, 500)], 0, 2.0),
        # An idle engine keeps its rate.
        ([PrefillLoad(0, 0, 2000, 500)], 0, 0.0),
        # Without a rate there is no need.
        ([PrefillLoad(queued_tokens=500)], 3, None),
        ([], 0, None),
    ],
)
def test_what_prefill_needs(loads, queued_requests, need):
    """The need is arriving tokens, plus queued ones over `catch_up_s`, over the measured rate."""
    assert prefill_need(loads, queued_requests, EVEN) == (None if need is None else pytest.approx(need))


@pytest.mark.parametrize(
    ("loads", "queued_requests", "need"),
    [
        # The target is half of the cache.
        ([DecodeLoad(kv_use=0.5, running=10)], 0, 1.0),
        ([DecodeLoad(kv_use=1.0, running=10), DecodeLoad(kv_use=0.5, running=5)], 0, 3.0),
        # Ten more requests wait, of the size of the ten that fill the cache.
        ([DecodeLoad(kv_use=1.0, running=10, waiting=10)], 0, 4.0),
        ([DecodeLoad(kv_use=1.0, running=10)], 10, 4.0),
        # Twice too slow; the cache has room.
        ([DecodeLoad(kv_use=0.1, running=10, tpot_s=0.1, decoding=10)], 0, 2.0),
        # Idle three quarters of the time.
        ([DecodeLoad(kv_use=0.0, running=0, tpot_s=0.1, decoding=0.25)], 0, 0.5),
        # A new replica adds nothing until it works.
        ([DecodeLoad(kv_use=0.1, running=10, tpot_s=0.1, decoding=10), DecodeLoad()], 0, 2.0),
        ([DecodeLoad()], 0, 0.0),
        ([], 5, None),
    ],
)
def test_what_decode_needs(loads, queued_requests, need):
    """KV or speed, whichever needs more engines."""
    assert decode_need(loads, queued_requests, EVEN) == (None if need is None else pytest.approx(need))


def test_without_a_target_speed_does_not_count():
    slow = [DecodeLoad(kv_use=0.5, running=10, tpot_s=9.0, decoding=10)]
    assert decode_need(slow, 0, EVEN.model_copy(update={"tpot_s": None})) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("need", "current", "settled"),
    [
        (2.0, 1, 2),
        (2.01, 2, 3),
        (2.0, 3, 3),  # 2.0 x 1.2 = 2.4: two would not do
        (1.6, 3, 2),  # 1.6 x 1.2 = 1.92
        (0.0, 3, 1),  # at least one
        (99.0, 3, 8),  # at most the bound
        (None, 3, 3),
        (float("inf"), 3, 3),
        (float("nan"), 3, 3),
    ],
)
def test_whole_engines(need, current, settled):
    assert settle(need, Bounds(0, 8, current), EVEN) == settled


@pytest.mark.parametrize(
    ("wanted", "prefill_bounds", "decode_bounds", "decided"),
    [
        ((2, 2), (1, 8), (1, 8), (2, 2)),
        ((8, 1), (1, 8), (1, 8), (8, 2)),  # at most 4 to 1
        ((1, 8), (1, 8), (1, 8), (2, 8)),  # at least 1 to 4
        ((9, 1), (1, 16), (1, 8), (9, 3)),  # 9 / 4, rounded up
        ((1, 9), (1, 8), (1, 16), (3, 9)),
        # decode cannot follow: more prefill engines would be idle
        ((8, 1), (1, 8), (1, 1), (4, 1)),
        ((1, 8), (1, 1), (1, 8), (1, 4)),
        ((8, 1), (6, 8), (1, 1), (6, 1)),  # the lower bound takes precedence
    ],
)
def test_the_ratio_is_kept(wanted, prefill_bounds, decode_bounds, decided):
    """The role below its ratio is raised; if its bounds prevent that, the other is limited."""
    p_wanted, d_wanted = wanted
    (p_least, p_most), (d_least, d_most) = prefill_bounds, decode_bounds
    prefill, decode = Bounds(p_least, p_most, p_wanted), Bounds(d_least, d_most, d_wanted)
    assert together(p_wanted, d_wanted, prefill, decode, EVEN) == decided


engines = st.integers(1, 40)


@st.composite
def bounds(draw: st.DrawFn) -> Bounds:
    lowest, highest = sorted((draw(engines), draw(engines)))
    return Bounds(lowest, highest, draw(st.integers(lowest, highest)))


@given(need=st.floats(0, 60), more=st.floats(0, 60), bound=bounds())
def test_no_oscillation_and_more_load_is_never_fewer_engines(need, more, bound):
    """The same load does not change a number that it has just caused."""
    once = settle(need, bound, EVEN)
    assert settle(need, Bounds(bound.lowest, bound.highest, once), EVEN) == once
    assert bound.lowest <= once <= bound.highest
    assert once <= settle(need + more, bound, EVEN)


@given(wanted=st.tuples(engines, engines), prefill=bounds(), decode=bounds())
def test_bounds_come_first_and_then_the_ratio(wanted, prefill, decode):
    """The counts are within the bounds, and within the ratio if the bounds allow it."""
    p_wanted, d_wanted = prefill.clip(wanted[0]), decode.clip(wanted[1])
    p, d = together(p_wanted, d_wanted, prefill, decode, EVEN)
    assert prefill.lowest <= p <= prefill.highest
    assert decode.lowest <= d <= decode.highest
    if p > d * 4:
        assert (p, d) == (prefill.lowest, decode.highest)
    if d > p * 4:
        assert (p, d) == (prefill.highest, decode.lowest)
    if decode.highest * 4 >= p_wanted and prefill.highest * 4 >= d_wanted:
        assert p >= p_wanted, "the ratio takes no needed engine away"
        assert d >= d_wanted


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"tpot": 0.05}, "tpot"),
        ({"fewest_prefill_per_decode": 2, "most_prefill_per_decode": 1}, "most_prefill_per_decode"),
    ],
)
def test_a_wrong_setting_is_named(given, key):
    with pytest.raises(SettingsError, match=key):
        parse_scaling(given)
