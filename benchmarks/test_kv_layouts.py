"""The benchmark counts the runs of a computation by hand."""

from __future__ import annotations

import pytest

from benchmarks.kv_layouts import measure


@pytest.mark.parametrize(("layout", "runs", "run_bytes"), [("LBNHC", 32768, 2048), ("LBHNC", 2048, 32768)])
def test_runs_of_one_layer(layout: str, runs: int, run_bytes: int) -> None:
    """32k tokens of 8 heads in blocks of 16, TP 1 to 2: a run per token, or a run per block."""
    row = measure(layout, layers=1, kv_heads=8, tokens=32768, block_tokens=16, content_bytes=512, rounds=1)
    assert (row["runs"], row["run_bytes"]) == (runs, run_bytes)
