"""Every pair of PP x PCP x TP x DCP grids: plans proved, and a request moved byte for byte.

The engines' machines run over the memory transport; no engine starts. ``tests/transport/grids.py``
has the matrix and the oracle.
"""

from __future__ import annotations

import time

from tests.campaigns.runner import Report, part_of
from tests.transport.grids import cases, check_pair


def grids(report: Report, *, part: str = "1/1", kv_heads: str = "1,2,4") -> None:
    """``part`` i/n: every n-th pair."""
    for heads in map(int, kv_heads.split(",")):
        began, written, compared, rank_pairs = time.monotonic(), 0, 0, 0
        chosen = part_of(list(enumerate(cases(heads))), part)
        for number, (producer, consumer) in chosen:
            with report.case(f"pair {number} with {heads} KV heads: {producer} to {consumer}"):
                sizes = check_pair(producer, consumer, seed=number)
                written, compared = written + sizes[0], compared + sizes[1]
                rank_pairs += producer.grid.size * consumer.grid.size
        report.row(
            kv_heads=heads,
            pairs=len(chosen),
            rank_pairs=rank_pairs,
            mb_written=round(written / 1e6, 1),
            mb_compared=round(compared / 1e6, 1),
            seconds=round(time.monotonic() - began),
        )
