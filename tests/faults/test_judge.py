"""The judge detects each kind of broken promise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from tests.campaigns.faults.judge import Case, Outcome, Pool, findings, judge, late
from tests.campaigns.faults.lane import Lane
from tests.campaigns.faults.presets import PRESETS
from tests.campaigns.faults.questions import Questions
from tests.campaigns.faults.trials import Question, Trial

QUESTION = Question("mira=427\nmira?", 9, "427\nkelo=093")


def ended(**fields: object) -> Trial:
    trial = Trial(QUESTION, **fields)  # type: ignore[arg-type]
    trial.stamp("ended")
    return trial


@pytest.mark.parametrize(
    ("trial", "outcome"),
    [
        (ended(text=QUESTION.expected, complete=True, finish="length"), Outcome.RIGHT),
        (ended(text="093\nkelo=427", complete=True, finish="length"), Outcome.WRONG),
        # The fact is right, but the text after it differs from a plain engine's: wrong KV as well.
        (ended(text="427\nkelo=094", complete=True, finish="length"), Outcome.WRONG),
        (ended(text="427", complete=True, finish="length"), Outcome.WRONG),
        (ended(text="427", complete=True, finish="error"), Outcome.REFUSED),
        (ended(text="427", failure="the stream ends without [DONE]"), Outcome.REFUSED),
        (ended(text="09", failure="the stream ends without [DONE]"), Outcome.WRONG),
        (ended(failure="decode: 500"), Outcome.REFUSED),
        (ended(gave_up="decode"), Outcome.HANG),
        (ended(text="427", gave_up="decode"), Outcome.HANG),
        (ended(text="9", gave_up="decode"), Outcome.WRONG),
        (Trial(QUESTION), Outcome.HANG),
        (ended(cancelled=True), Outcome.CANCELLED),
        (ended(text="4", cancelled=True), Outcome.CANCELLED),
        (ended(text="5", cancelled=True), Outcome.WRONG),
    ],
)
def test_every_ending_has_one_outcome(trial: Trial, outcome: Outcome) -> None:
    """Streamed text is judged however the stream ended."""
    assert judge(trial) is outcome


RIGHT = {Outcome.RIGHT: 3}
CLEAN = (Pool("prefill", 0.4), Pool("decode", 1.9))


def test_kept_promises_leave_no_findings() -> None:
    """Refusals and closed connections break no promise."""
    outcomes = {Outcome.RIGHT: 1, Outcome.REFUSED: 2, Outcome.CANCELLED: 1}
    case = Case(outcomes, pools=CLEAN, probes=[Outcome.RIGHT])
    assert findings(case) == []
    assert late(case) == []


@pytest.mark.parametrize(
    ("case", "finding"),
    [
        (Case({Outcome.WRONG: 2}, pools=CLEAN), "wrong answer (2)"),
        (Case({Outcome.HANG: 1}, pools=CLEAN), "hang (1)"),
        (Case(RIGHT, dead={"decode"}), "decode engine died"),
        (Case(RIGHT, pools=[Pool("prefill", None, 12)]), "prefill leaks 12 blocks"),
        (Case(RIGHT, pools=[Pool("prefill", None, 1, silent=True)]), "prefill hangs"),
        (Case(RIGHT, pools=CLEAN, probes=[Outcome.RIGHT, Outcome.WRONG]), "probe wrong"),
        (Case(RIGHT, pools=CLEAN, probes=[Outcome.HANG, Outcome.HANG]), "probe hang"),
        (Case(RIGHT, pools=CLEAN, probes=[Outcome.REFUSED]), "probe refused"),
    ],
)
def test_every_broken_promise_is_a_finding(case: Case, finding: str) -> None:
    """The judge reports each broken promise once."""
    assert findings(case) == [finding]


def test_a_pool_that_a_lease_has_held_is_late_but_no_leak() -> None:
    """The report has the duration, and whether it includes the wait for a replacement."""
    pools = [Pool("prefill", 5.2, 48), Pool("decode", 8.0, 3, waited_for_replacement=True)]
    case = Case(RIGHT, pools=pools)
    assert findings(case) == []
    assert late(case) == ["prefill 48 blocks 5 s", "decode 3 blocks 8 s (until the dead one was replaced)"]


async def test_a_block_that_stays_is_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block above the baseline is a leak; blocks that come back are timed."""
    for held_s, counts, left_s, most in ((0.5, [2], None, 1), (60.0, [7, 1], 3.0, 6)):
        used = iter(counts)

        async def count(_: Lane, __: str, used: Iterator[int] = used, last: int = counts[-1]) -> int:
            return next(used, last)

        monkeypatch.setattr(Lane, "_used", count)
        async with httpx.AsyncClient() as client:
            lane = Lane(replace(PRESETS["tandem"], held_s=held_s), tmp_path, Questions({}), client)
            lane.servers = {"prefill": SimpleNamespace(alive=lambda: True)}  # type: ignore[dict-item]
            lane.baseline, lane.repair = {"prefill": 1}, asyncio.ensure_future(asyncio.sleep(0, {}))
            await lane.repair
            pool = await lane.pool("prefill", time.monotonic() - 3.0)
        assert (pool.back_after_s is None, pool.most) == (left_s is None, most)
        assert left_s is None or (pool.back_after_s or 0.0) > left_s
