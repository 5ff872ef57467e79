"""Replay every load under every policy: `python -m benchmarks.routing [--seeds 3] [--jobs 2]`.

Writes benchmarks/results/routing.json and the tables build/routing.md; `--page` writes the tables
from existing results.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.routing.fleet import Fleet, Policy, replay
from benchmarks.routing.loads import LOADS, Load
from benchmarks.routing.oracle import Oracle
from benchmarks.routing.policies import AlwaysRemote, NeverRemote, Ours, RoundRobin, Threshold
from benchmarks.routing.report import (
    BLIND,
    ORACLE,
    OURS,
    STORES_UNKNOWN,
    THRESHOLDS,
    Measured,
    measure,
    tables,
    threshold,
)
from configs.settings.router import RoutingSettings

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "routing.json"
PAGE = ROOT / "build" / "routing.md"
PREFIX_LOADS = ("multi-turn", "shared system prompts")


def begin(load: Load) -> Fleet:
    """Return the idle fleet of a load."""
    return Fleet(load.hardware, load.prefill, load.decode, load.factors, load.stored_tokens, load.hosts)


def arms(load: Load) -> dict[str, Callable[[], Policy]]:
    """Return every policy, new and without measurements."""
    found: dict[str, Callable[[], Policy]] = {
        OURS: lambda: Ours(RoutingSettings()),
        "always remote": AlwaysRemote,
        "never remote": NeverRemote,
        "round robin": RoundRobin,
        **{threshold(tokens): lambda tokens=tokens: Threshold(tokens) for tokens in THRESHOLDS},  # type: ignore[misc]
        ORACLE: lambda: Oracle(load, ttft_only=False),
    }
    if load.name in PREFIX_LOADS:
        found[BLIND] = lambda: Ours(RoutingSettings(prefix_tokens_per_engine=0))
    if load.stored_tokens:
        found[STORES_UNKNOWN] = lambda: Ours(RoutingSettings(), knows_stores=False)
    return found


def first_token_arms(load: Load) -> dict[str, Callable[[], Policy]]:
    """Return the policies for clients that need fast first tokens only."""
    return {
        OURS: lambda: Ours(RoutingSettings(interference_weight=0, decode_weight=0)),
        ORACLE: lambda: Oracle(load, ttft_only=True),
    }


def play(task: tuple[int, int, bool]) -> dict[str, Measured]:
    """Replay all arms of one load and seed."""
    index, seed, first_tokens = task
    load = LOADS[index](seed)
    chosen = first_token_arms(load) if first_tokens else arms(load)
    return {name: measure(replay(load, policy(), begin)) for name, policy in chosen.items()}


def run(seeds: int, jobs: int) -> dict[str, Any]:
    """Return all results as JSON values."""
    tasks = [(index, seed, False) for index in range(len(LOADS)) for seed in range(1, seeds + 1)]
    tasks += [(index, 1, True) for index in range(len(LOADS))]
    with ProcessPoolExecutor(jobs) as pool:
        played = dict(zip(tasks, pool.map(play, tasks), strict=True))
    loads = []
    for index, make in enumerate(LOADS):
        load = make(1)
        loads.append(
            {
                "name": load.name,
                "description": (make.__doc__ or "").strip(),
                "requests": len(load.requests),
                "fleet": f"{load.prefill} prefill and {load.decode} decode engines ({load.hardware.name})",
                "seeds": [played[index, seed, False] for seed in range(1, seeds + 1)],
                "first_tokens": played[index, 1, True],
            }
        )
    return {"seeds": seeds, "loads": loads}


def main() -> None:
    """Replay the loads and write the results and the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--page", action="store_true", help="only write the tables, from existing results")
    options = parser.parse_args()
    if not options.page:
        RESULTS.write_text(json.dumps(run(options.seeds, options.jobs), indent=1) + "\n")
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(tables(json.loads(RESULTS.read_text())))
    print(PAGE.read_text())


if __name__ == "__main__":
    main()
