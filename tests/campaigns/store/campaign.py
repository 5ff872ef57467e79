"""Faults of the KV store, without engines.

    python -m tests.campaigns.store.campaign --seed 1 --faults 10000

Each round draws a fault and sends requests. The campaign checks every byte that a request would
use. At the end nothing may be left: no staging memory, no unfinished file, no file descriptor, no
growth of memory; and the budget must have held.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from tests.campaigns.store.faults import FAULTS
from tests.campaigns.store.world import Outcome, World

MAX_GROWTH_MIB = 32
_WARM_UP = 0.3
_CHECK_EVERY = 10


def run(root: Path, memory: Path, seed: int, faults: int, without: frozenset[str] = frozenset()) -> Outcome:
    """Draw and inject ``faults`` faults. ``without`` names kinds to omit."""
    world = World(root, memory, seed)
    chosen = {fault: weight for fault, weight in FAULTS.items() if fault.__name__ not in without}
    dice = random.Random(f"faults {seed}")
    grown = Growth()
    for number in range(faults):
        fault = dice.choices(list(chosen), list(chosen.values()))[0]
        fault(world)
        world.outcome.faults[fault.__name__] += 1
        world.ask(dice.randrange(2))
        if number % _CHECK_EVERY == 0:
            world.check_budget()
        if number == int(faults * _WARM_UP):
            grown.begin()
    world.close()
    world.outcome.leaked += grown.end()
    return world.outcome


class Growth:
    """Memory, threads and descriptors of this process between two moments."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._before: tuple[int, int] | None = None
        self._threads = threading.active_count()
        self._descriptors = self._process.num_fds()

    def begin(self) -> None:
        gc.collect()
        self._before = (self._process.memory_info().rss, 0)

    def end(self) -> list[str]:
        gc.collect()
        time.sleep(0.2)
        found = []
        if self._before is not None:
            growth = (self._process.memory_info().rss - self._before[0]) >> 20
            if growth > MAX_GROWTH_MIB:
                found.append(f"memory grew by {growth} MiB")
        if threading.active_count() > self._threads:
            found.append(f"{threading.active_count() - self._threads} threads are left")
        if self._process.num_fds() > self._descriptors:
            found.append(f"{self._process.num_fds() - self._descriptors} file descriptors are left")
        return found


def main(argv: list[str] | None = None) -> int:
    """Return 0 if no answer was wrong, no wait too long, and nothing is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=10_000)
    options = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        outcome = run(Path(root), Path(memory), options.seed, options.faults)
    return report(outcome, options.seed, time.monotonic() - began, "tokens")


def report(outcome: Outcome, seed: int, seconds: float, unit: str) -> int:
    """Print the results; return 0 if all were right."""
    for kind, findings in (
        ("wrong", outcome.wrong),
        ("late", outcome.late),
        ("over budget", outcome.over_budget),
        ("leaked", outcome.leaked),
    ):
        for finding in findings[:20]:
            print(f"{kind}: {finding}")
    print(", ".join(f"{name} {count}" for name, count in sorted(outcome.faults.items())))
    print(", ".join(f"{name} {count}" for name, count in sorted(outcome.counts.items())))
    print(
        f"seed {seed}: {sum(outcome.faults.values())} faults, {outcome.requests} requests, "
        f"{outcome.hit_tokens / max(1, outcome.tokens):.0%} of {unit} loaded, {len(outcome.wrong)} wrong, "
        f"{len(outcome.late)} late, longest wait {outcome.longest_wait_s:.2f} s, over budget "
        f"{len(outcome.over_budget)} times, {len(outcome.leaked)} leaks, {seconds:.0f} s"
    )
    return 0 if outcome.right else 1


if __name__ == "__main__":
    # Threads that hang in a system call must not keep the campaign from ending.
    code = main()
    sys.stdout.flush()
    os._exit(code)
