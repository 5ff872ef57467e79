"""Breakdowns of requests by hand and of random ones: the parts sum to the total."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.request import EngineTimings
from actors.telemetry.latency_breakdown import PARTS, CallTimes, RequestTimestamps, break_down

PREFILL = EngineTimings(queued_s=2, scheduled_s=5, first_token_s=45, answered_s=46)
DECODE = EngineTimings(
    queued_s=1, scheduled_s=56, first_token_s=66, answered_s=67, kv_asked_s=3, kv_ended_s=52, kv_failed=False
)
REMOTE = RequestTimestamps(
    arrived_at=1000,
    read_at=1001,
    tried_at=1003,
    retried_at=1003,
    slots_at=1007,
    # Sent at 1010, with a round trip of 2 s. Prefill receives the leg at 1011 and has computed
    # the prompt at 1056.
    prefill=CallTimes(1010, 1058, PREFILL),
    # Sent at 1011, with a round trip of 4 s. Decode receives the leg at 1013, and the KV by 1065.
    decode=CallTimes(1011, 1082, DECODE),
    streams=True,
)
"""Timestamps in whole seconds, easy to add up."""

REMOTE_PARTS = {
    "body": 1,
    "router": 2 + 3,
    "slot_wait": 4,
    "hops": 1 + 2,  # to prefill; back from decode
    "frontend": 2 + 1,  # prefill's tokenizer; decode's detokenizer
    "prefill_queue": 3,
    "prefill": 40,
    "transfer": 9,  # from 1056 to 1065
    "decode_queue": 4,
    "first_step": 10,
}


ALONE = EngineTimings(queued_s=1, scheduled_s=4, first_token_s=50, answered_s=52)
LOCAL = replace(REMOTE, prefill=None, decode=CallTimes(1010, 1066, ALONE))
NOTHING = dict.fromkeys(REMOTE_PARTS.keys() - {"body", "router", "slot_wait"}, 0)
"""No time in any engine, nor on the way to it."""


def on_prefill(**more: Any) -> RequestTimestamps:
    """Return the request with other timings of prefill."""
    return replace(REMOTE, prefill=CallTimes(1010, 1058, replace(PREFILL, **more)))


def on_decode(**more: Any) -> RequestTimestamps:
    """Return the request with other timings of decode."""
    return replace(REMOTE, decode=CallTimes(1011, 1082, replace(DECODE, **more)))


@pytest.mark.parametrize(
    ("timestamps", "changed"),
    [
        (on_prefill(store_asked_s=3, store_ended_s=4), {"store": 1, "prefill_queue": 2}),
        # A second fetch after a preemption is not counted.
        (on_prefill(store_asked_s=7, store_ended_s=8), {}),
        (replace(REMOTE, streams=False), {"frontend": 2, "generation": 1}),
        (replace(REMOTE, tried_at=1002), {"router": 4, "retries": 1}),
        (on_decode(kv_failed=True), {"first_step": 0, "recompute": 10}),
        # A fetch on decode while prefill computes delays nothing.
        (on_decode(store_asked_s=1.5, store_ended_s=2.5), {}),
        # The KV was there at 1054, before prefill had sampled an unused token at 1056.
        (on_decode(kv_ended_s=41), {"transfer": 0, "prefill": 38, "decode_queue": 15}),
        # Decode had blocks for the prompt, computed at 1056, only at 1060: no slow transfer.
        (on_decode(kv_asked_s=47), {"transfer": 5, "decode_queue": 4 + 4}),
        # Decode has the whole prefix cached: prefill's time does not count.
        (
            on_decode(kv_asked_s=None, kv_ended_s=None),
            NOTHING | {"hops": 3 + 2, "frontend": 2, "decode_queue": 55, "first_step": 10},
        ),
        # A local request: decode's first step computes the prompt as well.
        (LOCAL, NOTHING | {"hops": 4, "frontend": 1 + 2, "decode_queue": 3, "prefill": 46}),
        (
            replace(LOCAL, decode=CallTimes(1010, 1066, replace(ALONE, store_asked_s=2, store_ended_s=3))),
            NOTHING | {"hops": 4, "frontend": 1 + 2, "decode_queue": 2, "store": 1, "prefill": 46},
        ),
        # Engines that report nothing.
        (
            replace(REMOTE, prefill=CallTimes(1010, 1082, None)),
            NOTHING | {"hops": 3 + 2, "frontend": 1 + 1, "decode_queue": 2 + 4, "unexplained": 49, "first_step": 10},
        ),
        (replace(REMOTE, decode=CallTimes(1011, 1082, None)), NOTHING | {"unexplained": 72}),
    ],
)
def test_one_change_of_a_remote_request(timestamps: RequestTimestamps, changed: dict[str, int]) -> None:
    expected = {part: seconds for part, seconds in (REMOTE_PARTS | changed).items() if seconds}
    assert break_down(timestamps).parts == expected


def test_a_remote_request():
    """Every part has the duration computed by hand."""
    breakdown = break_down(REMOTE)
    assert breakdown.parts == REMOTE_PARTS
    assert breakdown.total_s == sum(REMOTE_PARTS.values()) == 82
    assert [(span.part, span.begin_s, span.end_s) for span in breakdown.spans] == [
        ("body", 0, 1),
        ("router", 1, 3),
        ("slot_wait", 3, 7),
        ("router", 7, 10),
        ("hops", 10, 11),
        ("frontend", 11, 13),
        ("prefill_queue", 13, 16),
        ("prefill", 16, 56),
        ("transfer", 56, 65),
        ("decode_queue", 65, 69),
        ("first_step", 69, 79),
        ("frontend", 79, 80),
        ("hops", 80, 82),
    ]


moments = st.floats(0, 100, allow_nan=False)
durations = st.floats(-1, 150, allow_nan=False)


def timings(draw: Any) -> EngineTimings | None:
    if draw(st.booleans()):
        return None
    numbers = {field.name: draw(durations) for field in fields(EngineTimings) if field.name[:2] != "kv"}
    kv = {"kv_asked_s": draw(durations), "kv_ended_s": draw(durations)} if draw(st.booleans()) else {}
    return EngineTimings(**numbers, **kv, kv_failed=draw(st.booleans()))


@st.composite
def any_marks(draw: Any) -> RequestTimestamps:
    """Timestamps in any order and impossible durations: clocks that jump, wrong reports."""
    legs = [CallTimes(draw(moments), draw(moments), timings(draw)) for _ in range(2)]
    prefill = legs[0] if draw(st.booleans()) else None
    at: tuple[float, float, float, float, float] = draw(st.tuples(*[moments] * 5))
    return RequestTimestamps(*at, decode=legs[1], prefill=prefill, streams=draw(st.booleans()))


@given(any_marks())
def test_the_parts_are_the_total_whatever_the_marks(timestamps):
    """The parts have no gap, no overlap and no negative duration, and keep their order."""
    breakdown = break_down(timestamps)
    total_s = max(timestamps.decode.answered_at - timestamps.arrived_at, 0)
    assert breakdown.total_s == pytest.approx(total_s, abs=1e-9)
    assert sum(breakdown.parts.values()) == pytest.approx(total_s, abs=1e-9)
    assert list(breakdown.parts) == [part for part in PARTS if part in breakdown.parts]
    assert all(seconds > 0 for seconds in breakdown.parts.values())
    moment = 0.0
    for before, span in zip([None, *breakdown.spans], breakdown.spans, strict=False):
        assert span.begin_s == moment < span.end_s
        assert before is None or before.part != span.part
        moment = span.end_s
