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

MAX_GROWTH_BYTES = 32 << 20
_WARM_UP = 0.3
_CHECK_EVERY = 10


def run(root: Path, memory: Path, seed: int, faults: int, without: frozenset[str] = frozenset()) -> Outcome:
    """Draw and inject ``faults`` faults. ``without`` names kinds to omit."""
    world = World(root, memory, seed)
    chosen = {fault: weight for fault, weight in FAULTS.items() if fault.__name__ not in without}
    dice = random.Random(f"faults {seed}")
    process = psutil.Process()
    threads, descriptors, before = threading.active_count(), process.num_fds(), 0
    for number in range(faults):
        fault = dice.choices(list(chosen), list(chosen.values()))[0]
        fault(world)
        world.outcome.faults[fault.__name__] += 1
        world.ask()
        if number % _CHECK_EVERY == 0:
            world.check_budget()
        if number == int(faults * _WARM_UP):
            gc.collect()
            before = process.memory_info().rss
    world.close()
    gc.collect()
    time.sleep(0.2)
    for what, more, most in (
        ("bytes of memory", process.memory_info().rss - before, MAX_GROWTH_BYTES),
        ("threads", threading.active_count() - threads, 0),
        ("file descriptors", process.num_fds() - descriptors, 0),
    ):
        if more > most:
            world.outcome.problems.append(f"{more} {what} are left")
    return world.outcome


def store_faults(report: Report, *, count: int = 10_000, seed: int = 1) -> None:
    """No answer may be wrong, no wait too long, and nothing may be left."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        outcome = run(report.folder, Path(memory), seed, count)
    for problem in outcome.problems[:50]:
        report.problem(problem)
    loaded = f"{outcome.hit_tokens / max(1, outcome.tokens):.0%}"
    report.row(faults=outcome.faults, counts=outcome.counts, requests=outcome.requests, tokens_loaded=loaded,
               longest_wait_s=round(outcome.longest_wait_s, 2))  # fmt: skip
