"""Simulate every load under every policy; write benchmarks/results and docs/images."""

import argparse
import logging
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
"""autoscaling_config of both roles; `target_ongoing_requests` is the policy's."""

TUNED_ON = "ramp"
NEARLY = 0.005
"""Difference of attainment that does not justify more GPU-hours."""


def shown(loads: dict[str, Any]) -> tuple[str, str]:
    """Return one setting of either policy, as an operator with one load would choose it."""
    outcomes = loads[TUNED_ON]["policies"]
    best: list[str] = []
    for ours in (True, False):
        named = {name: one for name, one in outcomes.items() if name.startswith("together") == ours}
        most = max(one["attained"] for one in named.values())
        enough = [name for name, one in named.items() if one["attained"] >= most - NEARLY]
        best.append(min(enough, key=lambda name: named[name]["gpu_hours"]))
    return best[0], best[1]


def policies() -> list[Policy]:
    """Return our policy with three targets, and Serve's with its default and a grid of pairs."""
    ours = [
        Policy(f"together, tpot_s {target:g}", {"policy_function": POLICY, "policy_kwargs": {"tpot_s": target}})
        for target in (0.025, 0.030, 0.035)
    ]
    targets = ((2, 2), *product((1, 2, 4), (16, 32, 48)))
    return [*ours, *(Policy(f"Serve's, {p} and {d} ongoing", targets=(p, d)) for p, d in targets)]


def main() -> None:
    """Simulate and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--traces", type=Path, nargs="*", default=[], help="recorded loads (benchmarks/scaling/loads.py)"
    )
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    loads = [*synthetic(options.seed), *map(from_file, options.traces)]
    runs = list(product(loads, policies()))
    results: dict[str, Any] = {
        load.name: {"about": load.about, "requests": len(load.arrivals), "policies": {}} for load in loads
    }
    with ProcessPoolExecutor(options.processes) as pool:
        for (load, policy), outcome in zip(runs, pool.map(_run, runs), strict=True):
            results[load.name]["policies"][policy.name] = outcome
            attained = ", ".join(f"{name} {outcome[name]:.1%}" for name in outcome if name.endswith("attained"))
            print(f"{load.name:12} {policy.name:28} {attained}, {outcome['gpu_hours']:.1f} GPU-hours", flush=True)
    for load_results in results.values():
        for name, outcome in load_results["policies"].items():
            if name not in shown(results):
                del outcome["timeline"]
    document = {"seed": options.seed, "step_s": STEP_S, "decide_every_s": DECIDE_EVERY_S, "autoscaling_config": CONFIG}
    document |= {"machine": asdict(MACHINE), "objective": asdict(OBJECTIVE), "loads": results}
    print("wrote", write("scaling", document))


def _run(run: tuple[Load, Policy]) -> dict[str, Any]:
    logging.disable(logging.INFO)
    outcome = asdict(simulate(*run, CONFIG))
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in outcome.items()}


if __name__ == "__main__":
    main()
