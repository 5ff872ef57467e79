"""Every pair of PP x PCP x TP x DCP grids: plans proved, and a request transferred byte for
byte: ``make grids``.

    python -m tests.campaigns.grids [--part 1/4] [--kv-heads 1 2 4]

The engines' machines run over the memory transport; no engine starts. ``tests/transport/grids.py``
has the matrix and the oracle.
"""

from __future__ import annotations

import argparse
import statistics
import time

from tests.transport.grids import cases, check_pair, grids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", default="1/1", help="part i of n: every n-th pair")
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[1, 2, 4])
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    print(
        "| KV heads | grids | pairs proved | rank pairs | MB written | MB compared | median ms per pair | largest ms |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kv_heads in options.kv_heads:
        times, written, compared, rank_pairs = [], 0, 0, 0
        for number, (producer, consumer) in enumerate(cases(kv_heads)):
            if number % parts != part - 1:
                continue
            since = time.perf_counter()
            try:
                sizes = check_pair(producer, consumer, seed=number)
            except BaseException as error:
                error.add_note(f"pair {number} with {kv_heads} KV heads: {producer} to {consumer}")
                raise
            times.append(1000 * (time.perf_counter() - since))
            written, compared = written + sizes[0], compared + sizes[1]
            rank_pairs += producer.grid.size * consumer.grid.size
        print(
            f"| {kv_heads} | {len(list(grids(kv_heads)))} | {len(times):,} | {rank_pairs:,} | {written / 1e6:.1f} | "
            f"{compared / 1e6:.1f} | {statistics.median(times):.0f} | {max(times):.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
