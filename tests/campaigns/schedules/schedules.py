"""``make schedules``: random schedules of larger transfers, and random steps of vLLM's scheduler.

    python -m tests.campaigns.schedules.schedules [--schedules 100000] [--seed 0]
        [--steps 10000] [--processes 1]

Prints counts; fails if a promise breaks. ``--replay SEED`` runs one schedule again.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterable

from tests.campaigns.schedules.scenarios import delivered, run
from tests.campaigns.schedules.simulated import Violation

BATCH = 500


def play(seeds: Iterable[int]) -> tuple[Counter[str], list[str]]:
    """Return (counts of events in these schedules, broken promises by schedule)."""
    totals: Counter[str] = Counter()
    broken: list[str] = []
    for seed in seeds:
        try:
            schedule = run(seed)
        except Violation as violation:
            broken.append(f"seed {seed}: {violation}")
            continue
        except Exception as error:
            broken.append(f"seed {seed}: a machine raised {error!r}")
            continue
        totals += schedule.world.counts
        totals["schedules"] += 1
        totals["calm"] += schedule.calm
        for request in schedule.world.consumptions.values():
            totals["requests that got their KV" if delivered(request) else "requests that did not"] += 1
    return totals, broken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first schedule")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replay", type=int, help="play the schedule with this seed, and nothing else")
    arguments = parser.parse_args()
    if arguments.replay is not None:
        run(arguments.replay)
        print(f"schedule {arguments.replay} keeps every promise")
        return
    first, last = arguments.seed, arguments.seed + arguments.schedules
    batches = [range(at, min(at + BATCH, last)) for at in range(first, last, BATCH)]
    started_at = time.monotonic()
    totals: Counter[str] = Counter()
    broken: list[str] = []
    with multiprocessing.get_context("spawn").Pool(arguments.processes) as pool:
        for number, (counts, violations) in enumerate(pool.imap_unordered(play, batches), 1):
            totals += counts
            broken += violations
            for violation in violations:
                print(f"BROKEN {violation}", flush=True)
            if number % 20 == 0 or number == len(batches):
                print(f"{totals['schedules']:>9,} schedules, {time.monotonic() - started_at:.0f} s", flush=True)
    for what, count in sorted(totals.items()):
        print(f"{count:>12,} {what}")
    if broken:
        sys.exit(
            f"{len(broken)} schedules break a promise; replay one:"
            " python -m tests.campaigns.schedules.schedules --replay SEED"
        )
    print("every schedule keeps every promise")


if __name__ == "__main__":
    main()
