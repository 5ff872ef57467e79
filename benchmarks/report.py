"""Medians with spread, and ratios of paired measurements."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import vllm

RESULTS = Path(__file__).parent / "results"


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return median, quartiles and count of the values."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": middle, "q1": low, "q3": high, "count": len(values)}


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, float]:
    """Ratio of the medians, and the quartiles of the ratios of paired measurements."""
    paired = summary([a / b for a, b in zip(ours, theirs, strict=True)])
    return {"of_medians": statistics.median(ours) / statistics.median(theirs), "q1": paired["q1"], "q3": paired["q3"]}


def read(name: str) -> dict[str, Any]:
    """Return what ``write`` has written under this name, without the machine; {} if nothing."""
    path = RESULTS / f"{name}.json"
    document: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return {key: value for key, value in document.items() if key != "run_on"}


def write(name: str, document: dict[str, Any]) -> Path:
    """Write ``benchmarks/results/NAME.json`` with the document and this machine."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "vllm": vllm.__version__}
    path.write_text(json.dumps({"run_on": machine, **document}, indent=2) + "\n")
    return path
