"""Simulate every load under every policy.

TRACES are CSV files of recorded loads (``benchmarks/scaling/loads.py``).
"""

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
from benchmarks.scaling.simulation import DECIDE_EVERY_S, MACHINE, OBJECTIVE, STEP_S, Simulation

CONFIG = {
    "min_replicas": 1,
    "max_replicas": 12,
    "upscale_delay_s": 10.0,
    "downscale_delay_s": 120.0,
    "look_back_period_s": 30.0,
}
"""autoscaling_config of both roles; `target_ongoing_requests` is the policy's."""


def policies() -> list[Policy]:
    """Return our policy with three targets, and Serve's with its default and a grid of pairs."""
    ours = [
        Policy(f"together, tpot_s {target:g}", {"policy_function": POLICY, "policy_kwargs": {"tpot_s": target}})
        for target in (0.025, 0.030, 0.035)
    ]
    targets = ((2, 2), *product((1, 2, 4), (16, 32, 48)))
    return [*ours, *(Policy(f"Serve's, {p} and {d} ongoing", targets=(p, d)) for p, d in targets)]


def main(*, seed: int = 1, traces: tuple[str, ...] = (), processes: int = 2) -> None:
    loads = [*synthetic(seed), *map(from_file, map(Path, traces))]
    runs = list(product(loads, policies()))
    results: dict[str, Any] = {
        load.name: {"about": load.about, "requests": len(load.arrivals), "policies": {}} for load in loads
    }
    with ProcessPoolExecutor(processes) as pool:
        for (load, policy), outcome in zip(runs, pool.map(_run, runs), strict=True):
            results[load.name]["policies"][policy.name] = outcome
            attained = ", ".join(f"{name} {outcome[name]:.1%}" for name in outcome if name.endswith("attained"))
            print(f"{load.name:12} {policy.name:28} {attained}, {outcome['gpu_hours']:.1f} GPU-hours", flush=True)
    document = {"seed": seed, "step_s": STEP_S, "decide_every_s": DECIDE_EVERY_S, "autoscaling_config": CONFIG}
    document |= {"machine": asdict(MACHINE), "objective": asdict(OBJECTIVE), "loads": results}
    write("scaling", document)


def _run(run: tuple[Load, Policy]) -> dict[str, Any]:
    logging.disable(logging.INFO)
    outcome = asdict(Simulation(*run, CONFIG).play())
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in outcome.items()}
