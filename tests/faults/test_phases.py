"""The phase in which a fault occurred."""

from __future__ import annotations

from typing import Any

import pytest

from tests.campaigns.faults.phases import seen
from tests.campaigns.faults.trials import Question, Trial

QUESTION = Question("", 600, "", "")


def trial(**timestamps: float) -> Trial:
    return Trial(QUESTION, trial_id="abc", timestamps=dict(timestamps), params={"transfer_id": "t1"})


def traced(*events: tuple[float, str, Any]) -> list[dict[str, Any]]:
    """Return (time, event, tokens of a chunk) of the trial's transfer."""
    return [
        {"t": at, "event": name, "transfer": "t1"}
        if name not in ("chunk", "received")
        else {"t": at, "event": name, "request": "cmpl-abc-p-0", "tokens": tokens}
        for at, name, tokens in events
    ]


@pytest.mark.parametrize(
    ("timestamps", "phase"),
    [
        ({"prefill_sent": 1}, "prefill"),
        ({"prefill_sent": 1, "prefill_answered": 2}, "between legs"),
        ({"prefill_sent": 1, "prefill_answered": 2, "decode_sent": 3}, "waiting for KV"),
        ({"prefill_sent": 1, "prefill_answered": 2, "decode_sent": 3, "first_token": 4}, "decoding"),
        ({"prefill_sent": 1, "ended": 4.5}, "after the end"),
        ({"prefill_sent": 1, "ended": 6}, "prefill"),
    ],
)
def test_from_outside(timestamps: dict[str, float], phase: str) -> None:
    """Observations of any client; timestamps after the fault do not count."""
    assert seen(trial(**timestamps), 5.0) == phase


@pytest.mark.parametrize(
    ("events", "phase"),
    [
        (traced((1, "receive", None)), "queued"),
        (traced((1, "receive", None), (2, "chunk", 256)), "between chunks"),
        (traced((1, "offer", None), (2, "chunk", 256), (3, "chunk", 599), (4, "write", None)), "transfer"),
        (traced((1, "offer", None), (2, "chunk", 599), (6, "received", None)), "transfer"),
        (traced((1, "offer", None), (2, "chunk", 599), (4, "received", None)), "waiting to run"),
        ([{"t": 2.0, "event": "chunk", "request": "another", "tokens": 599}], "queued"),
    ],
)
def test_from_a_trace(events: list[dict[str, Any]], phase: str) -> None:
    """The two legs are sent at once."""
    assert seen(trial(prefill_sent=0.5, decode_sent=0.5), 5.0, events) == phase
