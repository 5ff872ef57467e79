"""Autoscaling of real engines by `ScaleTogether`, beside the simulation of the same load.

The service as deployed under Ray Serve, with vLLM engines of the demo model whose steps are paced
(`paced.py`), so that two cores hold six. The loads are those of `scaling` at 3/4 of their rates,
with prompts and answers 13 times shorter, and in less time; the delays of the autoscaler are
shorter too, but not Serve's intervals and Tandem's window (10 and 15 s). Engine speeds for the
simulation are measured before the load, the time of a start during it.

Errors are relative, of the mean numbers of ready replicas in windows of WINDOW_S. A *return* is a
replica that is removed and requested again while the offered load is constant.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import yaml

from actors.autoscaling.policy import POLICY
from benchmarks.engines import random_prompt
from benchmarks.report import failed, write
from benchmarks.scaling.autoscaler import ROLES, Policy
from benchmarks.scaling.engines import Machine
from benchmarks.scaling.loads import Arrival, Load, synthetic
from benchmarks.scaling.simulation import Objective, Simulation
from testing.service_process import ROOT, ServiceProcess, write_config

OBJECTIVE = Objective(ttft_s=2.0, tpot_s=0.4)
CONFIG = {
    "min_replicas": 1,
    "max_replicas": 3,
    "upscale_delay_s": 3.0,
    "downscale_delay_s": 30.0,
    "look_back_period_s": 15.0,
}
OURS = Policy("together", {"policy_function": POLICY, "policy_kwargs": {"tpot_s": 0.25}})
SEQUENCES = 32
ENGINE = {"max_num_seqs": SEQUENCES, "scheduler_cls": "benchmarks.scaling.paced.PacedScheduler"}
MOST_TOKENS = 1900
RATE, TOKENS = 0.75, 13
STEP_S, WINDOW_S, POLL_S = 0.05, 10.0, 0.5
TRACES = {"shift": (10.0, 3600.0, (1800.0,)), "bursts": (5.0, 1800.0, (300.0, 600.0, 1200.0, 1500.0))}
"""By load: how many times faster, its length before that, and when the offered load changes."""
LIMIT = 0.15
SCALING = re.compile(r"scaling Deployment\(name='(\w+)', app='tandem'\) from \d+ to (\d+) replicas")


@dataclass
class Counts:
    """Replicas of each role, over time."""

    at_s: list[float] = field(default_factory=list)
    ready: dict[str, list[int]] = field(default_factory=lambda: {role: [] for role in ROLES})
    requested: dict[str, list[int]] = field(default_factory=lambda: {role: [] for role in ROLES})

    def add(self, at_s: float, ready: dict[str, int], requested: dict[str, int]) -> None:
        self.at_s.append(round(at_s, 2))
        for role in ROLES:
            self.ready[role].append(ready[role])
            self.requested[role].append(requested[role])

    def means(self, role: str, seconds: float) -> list[float]:
        windows = np.digitize(self.at_s, np.arange(WINDOW_S, seconds, WINDOW_S))
        counts = np.array(self.ready[role])
        return [float(counts[windows == one].mean()) for one in range(int(seconds / WINDOW_S))]

    def starts(self) -> list[float]:
        """Return the times from a request of more replicas until they are ready."""
        found = []
        for role in ROLES:
            for begin, (before, wanted) in enumerate(pairwise(self.requested[role]), 1):
                later = zip(self.at_s[begin:], self.ready[role][begin:], strict=True)
                there = (at_s for at_s, count in later if count >= wanted)
                if wanted > before and (at_s := next(there, None)) is not None:
                    found.append(at_s - self.at_s[begin])
        return found

    def returns(self, changes: Iterable[float]) -> int:
        phases = np.digitize(self.at_s, list(changes))
        return sum(
            returns([count for count, phase in zip(counts, phases, strict=True) if phase == one])
            for counts in self.requested.values()
            for one in set(phases)
        )


def returns(counts: list[int]) -> int:
    """Return how often a count rises after it has fallen."""
    steps = [b - a for a, b in pairwise(counts) if a != b]
    return sum(a < 0 < b for a, b in pairwise(steps))


def live(load: Load, faster: float, seconds: float) -> Load:
    """Return the beginning of `load`, faster and for smaller engines."""
    dice = random.Random(0)
    kept = [one for one in load.arrivals if one.at_s < seconds and dice.random() < RATE / faster]
    arrivals = [
        Arrival(
            one.at_s / faster,
            min(max(one.prompt_tokens // TOKENS, 2), MOST_TOKENS),
            min(max(one.answer_tokens // TOKENS, 1), 100),
        )
        for one in kept
    ]
    return Load(load.name, load.about, seconds / faster, tuple(arrivals))


@dataclass(frozen=True)
class Client:
    session: aiohttp.ClientSession
    url: str
    dice: random.Random

    async def ask(self, prompt_tokens: int, answer_tokens: int) -> tuple[float, float]:
        """Return the times to the first token and per output token; infinite: no whole answer."""
        body = {"model": "demo", "prompt": random_prompt(self.dice, prompt_tokens), "max_tokens": answer_tokens}
        body |= {"ignore_eos": True, "stream": True, "temperature": 0}
        began, times = time.monotonic(), list[float]()
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
                async for line in response.content:
                    if line.startswith(b'data: {"id"'):
                        times.append(time.monotonic())
        except aiohttp.ClientError:
            times.clear()
        if len(times) < answer_tokens:
            return float("inf"), float("inf")
        return times[0] - began, (times[-1] - times[0]) / max(answer_tokens - 1, 1)

    async def machine(self) -> Machine:
        """Measure the speeds of idle engines."""
        await self.ask(100, 5)
        short, long = [
            statistics.median([(await self.ask(tokens, 1))[0] for _ in range(3)]) for tokens in (100, MOST_TOKENS)
        ]
        one = (await self.ask(20, 30))[1]
        eight = statistics.median(tpot for _, tpot in await asyncio.gather(*(self.ask(20, 60) for _ in range(8))))
        rate, sequence_s = (MOST_TOKENS - 100) / (long - short), (eight - one) / 7
        places = 2 * SEQUENCES
        return Machine(
            rate, one - sequence_s, sequence_s, handover_s=max(short - 100 / rate - one, 0.0),
            prefill_places=places, decode_places=places,
        )  # fmt: skip

    async def watch(self, service: ServiceProcess, counts: Counts, began: float) -> None:
        while True:
            async with self.session.get(f"{self.url}/health") as response:
                ready = (await response.json())["replicas"]
            requested = dict.fromkeys(ROLES, 1) | {role: int(to) for role, to in SCALING.findall(service.log)}
            counts.add(time.monotonic() - began, {role: ready[role.lower()] for role in ROLES}, requested)
            await asyncio.sleep(POLL_S)

    async def play(self, load: Load, service: ServiceProcess) -> tuple[list[tuple[float, float]], Counts]:
        counts, sent, began = Counts(), list[asyncio.Task[tuple[float, float]]](), time.monotonic()
        watching = asyncio.create_task(self.watch(service, counts, began))
        for one in load.arrivals:
            await asyncio.sleep(max(began + one.at_s - time.monotonic(), 0.0))
            sent.append(asyncio.create_task(self.ask(one.prompt_tokens, one.answer_tokens)))
        await asyncio.sleep(max(began + load.duration_s - time.monotonic(), 0.0))
        watching.cancel()
        return list(await asyncio.gather(*sent)), counts


def attained(times: list[tuple[float, float]]) -> dict[str, float]:
    first, each = np.array(times).T
    in_time, fast = first <= OBJECTIVE.ttft_s, each <= OBJECTIVE.tpot_s
    return {"ttft_attained": in_time.mean(), "tpot_attained": fast.mean(), "attained": (in_time & fast).mean()}


async def measure(load: Load, service: ServiceProcess) -> tuple[list[tuple[float, float]], Counts, Machine]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        client = Client(session, service.url, random.Random(0))
        machine = await client.machine()
        print(machine, flush=True)
        times, counts = await client.play(load, service)
    return times, counts, replace(machine, start_s=statistics.median(counts.starts() or [machine.start_s]))


def simulate(load: Load, machine: Machine) -> tuple[list[tuple[float, float]], Counts]:
    simulation, counts = Simulation(load, OURS, CONFIG, machine, STEP_S), Counts()
    fleets = simulation.prefill, simulation.decode
    for at_s in simulation.steps():
        if at_s <= load.duration_s:
            ready = {fleet.role: len(fleet.ready(at_s)) for fleet in fleets}
            counts.add(at_s, ready, {fleet.role: fleet.target for fleet in fleets})
    return [(one.ttft_s, one.tpot_s) for one in simulation.requests], counts


def compare(name: str, folder: Path) -> dict[str, Any]:
    faster, seconds, changes = TRACES[name]
    load = live({one.name: one for one in synthetic(1)}[name], faster, seconds)
    roles = {"replicas": CONFIG, "num_cpus": 0.1}
    path = write_config("local.yaml", folder, served_model_name="demo", engine=ENGINE, prefill=roles, decode=roles)
    config = yaml.safe_load(path.read_text())
    config["applications"][0]["autoscaling_policy"] = OURS.application
    path.write_text(yaml.safe_dump(config))
    service = ServiceProcess(path, folder, environment={"PYTHONPATH": str(ROOT)})
    service.start()
    try:
        times, counts, machine = asyncio.run(measure(load, service))
    finally:
        service.stop()
    sides = {"live": (times, counts), "simulated": simulate(load, machine)}
    row: dict[str, Any] = {"about": load.about, "faster": faster, "requests": len(times), "machine": asdict(machine)}
    for side, (own, replicas) in sides.items():
        row[side] = attained(own) | {"returns": replicas.returns(change / faster for change in changes)}
        row[side] |= {f"{role} replicas": replicas.means(role, load.duration_s) for role in ROLES}
        row[side]["replica_s"] = WINDOW_S * sum(sum(row[side][f"{role} replicas"]) for role in ROLES)
    live_row, simulated = row["live"], row["simulated"]
    row["errors"] = [
        abs(b - a) / a
        for role in ROLES
        for a, b in zip(live_row[f"{role} replicas"], simulated[f"{role} replicas"], strict=True)
    ]
    for what in ("ttft_attained", "tpot_attained", "attained", "returns", "replica_s"):
        print(f"{name:8} {what:14} live {live_row[what]:.3f}  simulated {simulated[what]:.3f}", flush=True)
    print(f"{name:8} error of replicas: median {np.median(row['errors']):.1%}, mean {np.mean(row['errors']):.1%}")
    return row | {"requested": {side: own[1].requested for side, own in sides.items()}}


def main(*, loads: tuple[str, ...] = tuple(TRACES)) -> int:
    rows = {}
    for name in loads:
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = compare(name, Path(folder))
    write("scaling_live", {"config": CONFIG, "objective": asdict(OBJECTIVE), "loads": rows})
    errors = [error for row in rows.values() for error in row["errors"]]
    return failed(
        {
            f"median error not below {LIMIT:.0%}": statistics.median(errors) >= LIMIT,
            "a replica was removed and requested again": any(row["live"]["returns"] for row in rows.values()),
        }
    )
