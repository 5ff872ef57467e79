"""Simulate every load under every policy; write benchmarks/results and docs/images."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from actors.autoscaling.policy import POLICY
from benchmarks.report import write
from benchmarks.scaling.autoscaler import Policy
from benchmarks.scaling.loads import Load, from_file, synthetic
from benchmarks.scaling.simulation import DECIDE_EVERY_S, MACHINE, OBJECTIVE, STEP_S, simulate

CONFIG = {
    "min_replicas": 1,
    "max_replicas": 12,
    "upscale_delay_s": 10.0,
    "downscale_delay_s": 120.0,
    "look_back_period_s": 30.0,
}
"""autoscaling_config of both roles, under every policy; `target_ongoing_requests` is the
policy's.
"""

TPOT_TARGETS_S = (0.025, 0.030, 0.035)
ONGOING_TARGETS = tuple(product((1, 2, 4), (16, 32, 48)))


TUNED_ON = "ramp"
NEARLY = 0.005
"""Difference of attainment that does not justify more GPU-hours."""


def shown(loads: dict[str, Any]) -> tuple[str, str]:
    """Return one setting of either policy, as an operator with one load to tune for would choose
    it.
    """
    outcomes = loads[TUNED_ON]["policies"]
    best: list[str] = []
    for ours in (True, False):
        named = {name: one for name, one in outcomes.items() if name.startswith("together") == ours}
        most = max(one["attained"] for one in named.values())
        enough = [name for name, one in named.items() if one["attained"] >= most - NEARLY]
        best.append(min(enough, key=lambda name: named[name]["gpu_hours"]))
    return best[0], best[1]


def policies() -> list[Policy]:
    """Return our policy with its one required target, and Serve's with its default and a grid of
    pairs.
    """
    ours = [
        Policy(f"together, tpot_s {target:g}", {"policy_function": POLICY, "policy_kwargs": {"tpot_s": target}})
        for target in TPOT_TARGETS_S
    ]
    serves = [Policy(f"Serve's, {p} and {d} ongoing", targets=(p, d)) for p, d in ((2, 2), *ONGOING_TARGETS)]
    return [*ours, *serves]


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate, write, plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--traces", type=Path, nargs="*", default=[], help="recorded loads (benchmarks/scaling/loads.py)"
    )
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(argv)
    loads = [*synthetic(options.seed), *map(from_file, options.traces)]
    runs = list(product(loads, policies()))
    results: dict[str, Any] = {
        load.name: {"about": load.about, "requests": len(load.arrivals), "policies": {}} for load in loads
    }
    with ProcessPoolExecutor(options.processes) as pool:
        for (load, policy), outcome in zip(runs, pool.map(_run, runs), strict=True):
            results[load.name]["policies"][policy.name] = outcome
            print(f"{load.name:12} {policy.name:28} {_line(outcome)}", flush=True)
    for load_results in results.values():
        for name, outcome in load_results["policies"].items():
            if name not in shown(results):
                del outcome["timeline"]
    path = write(
        "scaling",
        {
            "simulation": True,
            "seed": options.seed,
            "step_s": STEP_S,
            "decide_every_s": DECIDE_EVERY_S,
            "machine": asdict(MACHINE),
            "objective": asdict(OBJECTIVE),
            "autoscaling_config": CONFIG,
            "loads": results,
        },
    )
    print(f"tandem: wrote {path}; plots: python -m benchmarks.scaling.plot")
    return 0


def _run(run: tuple[Load, Policy]) -> dict[str, Any]:
    logging.disable(logging.INFO)
    return _rounded(asdict(simulate(*run, CONFIG)))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 4) if isinstance(value, float) else value


def _line(outcome: dict[str, Any]) -> str:
    return (
        f"both objectives {outcome['attained']:6.1%}, TTFT {outcome['ttft_attained']:6.1%}, "
        f"TPOT {outcome['tpot_attained']:6.1%}, {outcome['gpu_hours']:5.1f} GPU-hours, {outcome['changes']} changes"
    )


if __name__ == "__main__":
    sys.exit(main())
