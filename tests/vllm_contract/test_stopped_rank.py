"""A prefill rank that is stopped during a write and outlives its engine core: real processes and
NIXL.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("ending", [[], ["KILL=1"]], ids=["goes on", "is killed"])
def test_no_foreign_byte_of_a_rank_that_outlives_its_core(ending: list[str]) -> None:
    """The campaign `stopped-rank` runs more rounds."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "tests.campaigns", "stopped-rank", "COUNT=1", *ending]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
