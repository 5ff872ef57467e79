"""A part of the campaign on real servers: faults after which both servers live on."""

from __future__ import annotations

import pytest

from tests.campaigns.faults.campaign import play
from tests.campaigns.faults.schedule import Injection, schedule
from tests.campaigns.runner import Report

pytestmark = pytest.mark.engine(killed=True)

SEED = 4
WANTED = {
    "no fault decoding",
    "SIGSTOP prefill, SIGCONT soon chunks",
    "SIGSTOP decode, SIGCONT soon transfer",
    "client closes the connection offering",
    "client closes the connection decoding",
    "reference twice at once between",
    "reference with another prompt, after its own between",
    "reference altered engine id between",
}


async def test_promises_are_kept() -> None:
    """Right or refused, within the bound, pools at their baseline."""
    faults = schedule(SEED, (1, 1), f"^({'|'.join(f'[a-z]+ {what}' for what in sorted(WANTED))})$")
    chosen: dict[str, Injection] = {}
    while len(chosen) < len(WANTED):
        fault = next(faults)
        chosen.setdefault(f"{fault.what} {fault.first.phase}", fault)
    report = Report("faults-in-the-suite", {})
    await play(report, "tandem", iter(chosen.values()), lanes=1, damage=0.0)
    assert {f"{row['what']} {row['phase']}" for row in report.rows} == WANTED
    assert report.problems == [], [row.get("logs") for row in report.rows]
