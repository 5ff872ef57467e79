"""Faults of the KV store, without engines.

Each round draws a fault and sends requests. The campaign checks every byte that a request would
use. At the end nothing may be left: no staging memory, no unfinished file, no file descriptor, no
growth of memory; and the budget must have held.
"""

from __future__ import annotations

import gc
import random
import tempfile
import threading
import time
from pathlib import Path

import psutil

from tests.campaigns.runner import Report
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


def store_faults(report: Report, *, count: int = 10_000, seed: int = 1) -> None:
    """No answer may be wrong, no wait too long, and nothing may be left."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        outcome = run(report.folder, Path(memory), seed, count)
    found = {"wrong": outcome.wrong, "late": outcome.late, "over budget": outcome.over_budget, "leaked": outcome.leaked}
    for kind, findings in found.items():
        for one in findings[:20]:
            report.problem(f"{kind}: {one}")
    loaded = f"{outcome.hit_tokens / max(1, outcome.tokens):.0%}"
    report.row(faults=outcome.faults, counts=outcome.counts, requests=outcome.requests, tokens_loaded=loaded,
               longest_wait_s=round(outcome.longest_wait_s, 2))  # fmt: skip
