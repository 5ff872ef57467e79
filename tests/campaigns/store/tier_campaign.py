"""Faults of TandemStoreTier below vLLM's tiering manager, without engines.

    python -m tests.campaigns.store.tier_campaign --seed 1 --faults 10000

The kinds of faults are those of ``campaign.py``, except writers outside the tier.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.campaigns.store.campaign import Growth, report
from tests.campaigns.store.faults import FAULTS
from tests.campaigns.store.tier_world import TierWorld
from tests.campaigns.store.world import Outcome

_WITHOUT = {"two_writers", "killed_process"}
_WARM_UP = 0.3
_CHECK_EVERY = 10


def run(root: Path, seed: int, faults: int) -> Outcome:
    """Draw and inject ``faults`` faults."""
    world = TierWorld(root, seed)
    chosen = {fault: weight for fault, weight in FAULTS.items() if fault.__name__ not in _WITHOUT}
    dice = random.Random(f"faults {seed}")
    growth = Growth()
    for number in range(faults):
        fault = dice.choices(list(chosen), list(chosen.values()))[0]
        fault(world)
        world.outcome.faults[fault.__name__] += 1
        world.ask(dice.randrange(2))
        if number % _CHECK_EVERY == 0:
            world.check_budget()
        if number == int(faults * _WARM_UP):
            growth.begin()
    world.close()
    world.outcome.leaked += growth.end()
    return world.outcome


def main(argv: list[str] | None = None) -> int:
    """Return 0 if no chunk was wrong, no wait too long, and nothing is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", type=int, default=10_000)
    options = parser.parse_args(argv)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        outcome = run(Path(root), options.seed, options.faults)
    return report(outcome, options.seed, time.monotonic() - began, "chunks")


if __name__ == "__main__":
    # Threads that hang in a system call must not keep the campaign from ending.
    code = main()
    sys.stdout.flush()
    os._exit(code)
