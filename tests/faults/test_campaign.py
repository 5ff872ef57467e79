"""A part of the campaign on real servers: one fault of each kind after which both servers live
on.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from tests.campaigns.faults.campaign import Campaign
from tests.campaigns.faults.presets import PRESETS
from tests.campaigns.faults.schedule import schedule

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


async def test_promises_are_kept(tmp_path: Path) -> None:
    """Right or refused, within the bound, pools at their baseline; ``make faults`` runs the
    others.
    """
    out = tmp_path / "faults.json"
    pattern = f"^({'|'.join(f'[a-z]+ {what}' for what in sorted(WANTED))})$"
    faults = schedule(SEED, (1, 1), pattern)
    seen: dict[str, int] = {}
    while len(seen) < len(WANTED):
        fault = next(faults)
        seen.setdefault(f"{fault.what} {fault.phase}", fault.index)
    arguments = argparse.Namespace(
        seed=SEED,
        tp="1:1",
        dp="1:1",
        speculation=False,
        lanes=1,
        out=out,
        match=pattern,
        only=sorted(seen.values()),
        faults=0,
        seconds=300.0,
        pairs=False,
    )
    campaign = Campaign([PRESETS["tandem"]], arguments, tmp_path)
    await campaign.run()
    cases = json.loads(out.read_text()).values()
    assert {f"{case['what']} {case['phase']}" for case in cases} == WANTED
    broken = [(case["what"], case["findings"], case.get("logs")) for case in cases if case["findings"]]
    assert broken == []
    assert all(case["outcomes"]["right"] >= 1 for case in cases)
