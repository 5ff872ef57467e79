"""Replay every load under every policy, and print a table of the regret against the oracle."""

import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.report import read, write
from benchmarks.routing.fleet import Outcome, Policy, replay
from benchmarks.routing.loads import LOADS, Load
from benchmarks.routing.oracle import Oracle
from benchmarks.routing.policies import Ours, RoundRobin, Threshold
from configs.settings.router import RoutingSettings

OURS, ORACLE = "cost", "oracle"
THRESHOLDS = {f"threshold {tokens}": tokens for tokens in (128, 512, 2048)}
Measured = dict[str, float]


def arms(load: Load, first_tokens: bool) -> dict[str, Callable[[], Policy]]:
    """Return every policy, new and without measurements.

    ``first_tokens``  those for clients that need fast first tokens only
    """
    if first_tokens:
        settings = RoutingSettings(interference_weight=0, decode_weight=0)
        return {OURS: lambda: Ours(settings), ORACLE: lambda: Oracle(load, ttft_only=True)}
    return {
        OURS: Ours,
        "round robin": RoundRobin,
        "always remote": lambda: Threshold(0),
        **{name: lambda tokens=tokens: Threshold(tokens) for name, tokens in THRESHOLDS.items()},  # type: ignore[misc]
        ORACLE: lambda: Oracle(load, ttft_only=False),
    }


def measure(outcomes: Sequence[Outcome]) -> Measured:
    """Return means in milliseconds (TPOT: of each request), and the share of cached tokens."""
    tpot = [one.decode_s / (one.answer_tokens - 1) for one in outcomes if one.answer_tokens > 1]
    computed, asked = (sum(getattr(one, name) for one in outcomes) for name in ("computed_tokens", "prompt_tokens"))
    return {
        "ttft_ms": 1e3 * statistics.fmean(one.ttft_s for one in outcomes),
        "tpot_ms": 1e3 * statistics.fmean(tpot),
        "finish_ms": 1e3 * statistics.fmean(one.ttft_s + one.decode_s for one in outcomes),
        "cached_share": 1 - computed / asked,
    }


def play(task: tuple[int, int, bool]) -> dict[str, Measured]:
    index, seed, first_tokens = task
    load = LOADS[index](seed)
    return {name: measure(replay(load, policy())) for name, policy in arms(load, first_tokens).items()}


def run(seeds: int, jobs: int) -> dict[str, Any]:
    tasks = [(index, seed, False) for index in range(len(LOADS)) for seed in range(1, seeds + 1)]
    tasks += [(index, 1, True) for index in range(len(LOADS))]
    with ProcessPoolExecutor(jobs) as pool:
        played = dict(zip(tasks, pool.map(play, tasks), strict=True))
    loads = []
    for index, make in enumerate(LOADS):
        of_seeds = [played[index, seed, False] for seed in range(1, seeds + 1)]
        loads.append({"name": make(1).name, "seeds": of_seeds, "first_tokens": played[index, 1, True]})
    return {"seeds": seeds, "loads": loads}


def regrets(runs: Sequence[dict[str, Measured]], arm: str, number: str) -> tuple[float, float, float]:
    """Return the excess of `number` over the oracle's: of the means over seeds, least and most."""
    each = [run[arm][number] / run[ORACLE][number] - 1 for run in runs]
    mine, best = (statistics.fmean(run[name][number] for run in runs) for name in (arm, ORACLE))
    return mine / best - 1, min(each), max(each)


def table(document: dict[str, Any]) -> str:
    """Return the regret against the oracle: of the mean time to the last token, and of others."""
    lines = [
        "| load | last token | seeds | TTFT | TPOT | last token: round robin | best threshold | worst "
        "| TTFT, both weights 0, seed 1 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for load in document["loads"]:
        runs, first = load["seeds"], load["first_tokens"]
        mean, least, most = regrets(runs, OURS, "finish_ms")
        fixed = [regrets(runs, name, "finish_ms")[0] for name in THRESHOLDS]
        columns = [regrets(runs, OURS, "ttft_ms")[0], regrets(runs, OURS, "tpot_ms")[0]]
        columns += [regrets(runs, "round robin", "finish_ms")[0], min(fixed), max(fixed)]
        columns.append(first[OURS]["ttft_ms"] / first[ORACLE]["ttft_ms"] - 1)
        figures = " | ".join(f"{figure:+.1%}" for figure in columns)
        lines.append(f"| {load['name']} | {mean:+.1%} | {least:+.1%} … {most:+.1%} | {figures} |")
    return "\n".join(lines)


def main(*, seeds: int = 3, jobs: int = 2) -> None:
    write("routing", run(seeds, jobs))
    print(table(read("routing")))
