"""Parts of the campaign that kills decode engines at the seam, without engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from itertools import islice

import psutil
import pytest

from tests.campaigns.differential.seam_deaths import Blow, Round, Stream, report, seam_cases, tokens_of
from tests.campaigns.service.decode_deaths import DecodeEngine

CASES = list(islice(seam_cases(1), 3))
A, B, _ = [case.requests[0].headers["x-request-id"] for case in CASES]


@pytest.fixture
def engine() -> Iterator[DecodeEngine]:
    with ExitStack() as stack:
        waits = [sys.executable, "-c", "input()"]
        pids = []
        for _ in range(2):
            process = stack.enter_context(subprocess.Popen(waits, stdin=subprocess.PIPE))
            stack.callback(process.kill)
            pids.append(process.pid)
        yield DecodeEngine(*map(psutil.Process, pids))


def test_tokens_are_those_of_whole_events() -> None:
    choices = [[{"token_ids": ids}] for ids in ([], [1], [2, 3])] + [[]]
    events = [{"choices": some} for some in choices]
    body = b": ping\n\n" + b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in events)
    assert tokens_of(body + b"data: [DONE]\n\n") == 3
    assert tokens_of(body[: body.index(b"[2")]) == 1


def test_a_running_engine_is_killed_at_once(engine: DecodeEngine) -> None:
    """The tokens that clients have then are kept, except those of streams that have ended."""
    streams = [Stream(CASES[0]), Stream(CASES[1]), Stream(CASES[2], tokens=5, ended=True)]
    blow = Blow(streams, [engine], "core", at=2, stops=False)
    blow.heard()
    assert not blow.had
    streams[0].tokens = 1
    blow.heard()
    streams[1].tokens = 1
    assert blow.had == {A: 1, B: 0}
    assert psutil.wait_procs([engine.core], timeout=60)[1] == []
    assert engine.actor.is_running()


def test_a_stopped_engine_is_killed_later(engine: DecodeEngine) -> None:
    blow = Blow([Stream(CASES[0], tokens=1)], [engine], "actor", at=1, stops=True)
    blow.heard()
    assert not blow.had
    assert os.WIFSTOPPED(os.waitpid(engine.core.pid, os.WUNTRACED)[1])
    blow._kill()  # noqa: SLF001 - `until_killed` waits
    assert blow.had == {A: 1}
    assert psutil.wait_procs([engine.actor], timeout=60)[1] == []
    assert os.WIFCONTINUED(os.waitpid(engine.core.pid, os.WCONTINUED)[1])


def test_the_report_sums_rounds() -> None:
    one = Round(0, "core", False, 3, 16, 5, 2, 1, 5.0, True, 30.0, {"greedy": 2}, {})
    other = Round(1, "actor", True, 3, 16, 7, 6, 1, 7.0, True, 30.0, {"greedy": 4, "chat": 2}, {"x": ["text"]})
    *_, last, resumed, features = report([one, other]).splitlines()
    assert last == (
        "all: 2 engines killed under 32 streams; of the 12 unfinished ones of these engines, "
        "8 had exactly prefill's first token, 2 nothing; 1 streams differ"
    )
    assert resumed.endswith("every unfinished stream: 8")
    assert features == "open seams by feature: chat: 2, greedy: 6"
    assert json.loads(json.dumps(asdict(one)))["open"] == 2
