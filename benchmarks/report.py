"""Rounds in turn, medians with spread, ratios of paired measurements, and the results files."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).parent / "results"

Arm = TypeVar("Arm")


def turns(
    arms: Sequence[Arm], rounds: int, cells: Sequence[Any] = (None,), warm_up: int = 1
) -> Iterator[tuple[Any, Arm, bool]]:
    """Yield (cell, arm, whether to count it): each round measures every arm in every cell.

    In random order, because an arm's predecessor determines the content of the caches. Every
    second round reverses the order of the round before, so that no arm is more often the first.
    """
    dice = random.Random(0)
    orders: dict[Any, list[Arm]] = {}
    for number in range(-warm_up, rounds):
        for cell in cells:
            orders[cell] = dice.sample(arms, len(arms)) if number % 2 else orders.get(cell, list(arms))[::-1]
            for arm in orders[cell]:
                yield cell, arm, number >= 0
        print(f"round {number + 1} of {rounds}", flush=True)


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and count of the values."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "q1": low, "q3": high, "count": len(values)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ratio of the medians, and the quartiles of the ratios of paired measurements."""
    paired = summary([a / b for a, b in zip(ours, theirs, strict=True)])
    return {"of_medians": statistics.median(ours) / statistics.median(theirs), "q1": paired["q1"], "q3": paired["q3"]}


def p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def spread(row: Mapping[str, float] | None, digits: int = 2) -> str:
    """Return a `summary` or `ratios` as ``0.84 (0.63-1.25)``; empty for None."""
    if row is None:
        return ""
    middle = row["median"] if "median" in row else row["of_medians"]
    return f"{middle:.{digits}f} ({row['q1']:.{digits}f}-{row['q3']:.{digits}f})"


def read(name: str) -> dict[str, Any]:
    """Return what ``write`` has written under this name, without the machine; {} if nothing."""
    path = RESULTS / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {key: value for key, value in document.items() if key != "run_on"}


def write(name: str, document: Mapping[str, Any]) -> None:
    """Write ``benchmarks/results/NAME.json`` with the document and this machine."""
    from vllm import __version__

    path = RESULTS / f"{name}.json"
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "vllm": __version__}
    path.write_text(json.dumps({"run_on": machine, **document}, indent=2) + "\n")
    print(f"written to {path}")


def failed(checks: Mapping[str, bool]) -> int:
    """Print the names of failed checks; return the exit status."""
    for what, fails in checks.items():
        if fails:
            print(f"FAILED: {what}")
    return int(any(checks.values()))
