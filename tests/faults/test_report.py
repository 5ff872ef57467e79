"""The page lists the findings, and the command that replays each."""

from __future__ import annotations

from typing import Any

from tests.campaigns.faults.report import page


def case(index: int, **others: Any) -> dict[str, Any]:
    return {
        "connector": "nixl",
        "tp": "1:1",
        "seed": 3,
        "index": index,
        "family": "kill",
        "what": "SIGKILL prefill",
        "phase": "transfer",
        "hit": "waiting for KV",
        "on": "2026-01-01",
        "versions": {"nixl": "1"},
        "outcomes": {"right": 2, "refused": 1},
        "findings": [],
        "late": [],
    } | others


RESULTS = {
    "a": case(0, late=["prefill 48 blocks 5 s"]),
    "b": case(1, outcomes={"right": 1, "wrong": 2}, findings=["wrong answer (2)", "probe hang"], logs=["x: oh `no`"]),
    "c": case(2, connector="tandem", findings=[]),
    "d": {"not_applicable": "no remote_block_ids"},
}


def row(text: str, start: str) -> list[str]:
    found = [line for line in text.splitlines() if line.startswith(start)]
    assert len(found) == 1
    return [cell.strip() for cell in found[0].strip("|").split("|")]


def test_totals_count_requests_and_faults() -> None:
    """A wrong answer is always reported, among any number of right ones."""
    text = page("results.json", RESULTS)
    assert row(text, "| nixl | 1 → 1 | 2 |")[3:] == ["1", *"310200", "0", "1", "1 (5 s, at most 5 s)"]
    assert row(text, "| tandem | 1 → 1 | 1 |")[3] == "1"
    assert row(text, "| SIGKILL prefill |") == ["SIGKILL prefill", "kept (1)", "**probe 1, wrong 1** of 2"]


def test_every_finding_can_be_played_again() -> None:
    """The page has each finding with its command and its evidence."""
    text = page("results.json", RESULTS)
    told = text.partition("## Every finding")[2]
    assert "`--connector nixl --tp 1:1 --seed 3 --only 1`: SIGKILL prefill, waiting for KV" in told
    assert "**wrong answer (2); probe hang**" in told
    assert "`x: oh no`" in told
    assert "--only 0" not in told


def test_what_does_not_apply_is_counted_as_such() -> None:
    """A trial whose fault did not apply does not count as a kept promise."""
    assert "1 more did not apply" in page("results.json", RESULTS)
