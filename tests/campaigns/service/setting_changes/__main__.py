"""Change every setting of a running service, one after the other; print a table.

    python -m tests.campaigns.service.setting_changes [--only router. store.path]

A service with instant engines (`instant_engine.py`) on two Ray nodes of this machine. Each row of
the configuration reference is changed to another value by a deployment of one changed key, as
`serve deploy` does it. Then:

- the replicas of Router, Prefill and Decode that restarted are those that `configs/changes.py`
  promises, and no other replica restarts until the next change
- the value is in effect: in the actors, in what vLLM and the connector would get, in Serve's
  controller, or where a client sees it
- a request is answered with status 200

The exit status is 0 if all of this holds.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from testing.certificates import Authority
from testing.ports import free_port
from testing.ray_nodes import RayCluster
from testing.service_process import ROOT
from tests.campaigns.service.setting_changes.effects import KEYS_OF_THE_ENVIRONMENT, not_in_effect
from tests.campaigns.service.setting_changes.running import (
    EFFECT_S,
    NotSettledError,
    Replicas,
    Service,
    problem_within,
    restarted,
)
from tests.campaigns.service.setting_changes.steps import (
    LABEL,
    NOT_TRIED,
    SPECIAL,
    WORKER,
    Config,
    Files,
    Step,
    base_config,
    steps,
)

COLUMNS = ("setting", "from", "to", "where", "expected", "restarted", "in effect", "request", "s")


@dataclass
class Row:
    """Outcome of one step; `problems` lists what differs from the reference."""

    setting: str
    old: str
    new: str
    where: str
    expected: str
    restarted: str = ""
    effect: str = ""
    request: str = ""
    seconds: float = 0.0
    problems: tuple[str, ...] = ()

    def cells(self) -> tuple[str, ...]:
        values = (self.setting, self.old, self.new, self.where, self.expected, self.restarted, self.effect)
        return (*values, self.request, f"{self.seconds:.0f}")


class Campaign:
    """Steps on one service, each from the configuration of its group."""

    def __init__(self, service: Service, base: Config, worker: str, session: Path) -> None:
        self._service = service
        self._base = base
        self._worker = worker
        self._session = session
        self._last: Replicas | None = None
        """Replicas after the last step; None at first, and after a step that failed."""
        self._kept = base
        self._group: str | None = None

    def run(self, step: Step) -> Row:
        began = time.monotonic()
        if step.group != self._group:
            self._group, self._kept = step.group, self._base
        start = step.start(self._kept)
        setting = f"{step.name} ({step.note})" if step.note else step.name
        row = Row(setting, shown(step.before(start)), shown(step.value), step.where, step.restarts)
        try:
            row.problems = tuple(self._problems(step, start, row))
        except Exception as error:  # the next step deploys its own start configuration
            row.problems = (f"{type(error).__name__}: {error}",)
            self._last = None
        row.seconds = time.monotonic() - began
        return row

    def _problems(self, step: Step, start: Config, row: Row) -> list[str]:
        service = self._service
        if service.config != start:
            before = service.deploy(start)
        else:
            before = service.replicas()
            if self._last is not None and before != self._last:
                raise NotSettledError(f"replicas changed between two changes: {self._last}, then {before}")
        options: dict[str, Any] = {}
        if step.change.option is not None and step.change.option.startswith("ray_actor_options."):
            options = service.options(step.deployment)["ray_actor_options"]
        changed = step.changed(start, options)
        service.deploy(changed)
        problems = []
        effect = problem_within(
            EFFECT_S, lambda: not_in_effect(step, service, service.replicas(), self._worker, self._session)
        )
        row.effect = "yes" if effect is None else "no"
        row.request = service.request()
        after = service.replicas()
        row.restarted = restarted(before, after)
        if row.restarted != row.expected:
            problems.append(f"restarted: {row.restarted}, expected: {row.expected}")
        if effect is not None:
            problems.append(f"not in effect: {effect}")
        if row.request != "200":
            problems.append(f"request: {row.request}")
        self._last = after
        if step.keep:
            self._kept = changed
        return problems


def shown(value: object) -> str:
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def table(rows: list[Row]) -> str:
    cells = [COLUMNS, *(row.cells() for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells)


def files_in(folder: Path) -> Files:
    """Create the files that changed settings name."""
    authority = Authority(folder, "authority")
    chain, private = authority.issue("localhost")
    first = (chain, private, authority.file)
    second = tuple(Path(shutil.copy(one, folder / f"copy-{one.name}")) for one in first)
    return Files(folder, (first, (second[0], second[1], second[2])), (free_port(), free_port(), free_port()))


def start(folder: Path, nodes: ExitStack, token: str) -> tuple[RayCluster, str]:
    """Start two Ray nodes; return the cluster and the id of the worker node."""
    # Keys in the environment would take precedence over those of `args`.
    environment = {"PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": token} | dict.fromkeys(KEYS_OF_THE_ENVIRONMENT, "")
    cluster = RayCluster(folder, environment)
    memory = "--object-store-memory=100000000"
    nodes.callback(cluster.start_head("--num-cpus=3", memory).stop)
    special = ("--num-gpus=4", f'--resources={{"{SPECIAL}": 8}}', f"--labels={LABEL}={WORKER}", memory)
    nodes.callback(cluster.start_worker(3, *special).stop)
    import ray

    ray.init(address=f"127.0.0.1:{cluster.gcs_port}", namespace="serve", log_to_driver=False)
    nodes.callback(ray.shutdown)
    (worker,) = [one["NodeID"] for one in ray.nodes() if SPECIAL in one["Resources"]]
    return cluster, worker


def play(folder: Path, only: list[str]) -> list[Row]:
    """Start the service, run the chosen steps, and end it."""
    files = files_in(folder)
    token = secrets.token_hex(32)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    rows = []
    with ExitStack() as nodes:
        cluster, worker = start(folder, nodes, token)
        service = nodes.enter_context(closing(Service(cluster, token, files.certificates[0])))
        base = base_config(free_port())
        began = time.monotonic()
        service.deploy(deepcopy(base))
        print(f"the service runs after {time.monotonic() - began:.0f} s", flush=True)
        campaign = Campaign(service, base, worker, folder)
        for step in steps(files):
            if only and not any(step.name.startswith(one) for one in only):
                continue
            row = campaign.run(step)
            rows.append(row)
            verdict = "; ".join(row.problems) or "as promised"
            print(f"{row.setting}: {row.old} -> {row.new}, {row.where}, {row.seconds:.0f} s: {verdict}", flush=True)
    return rows


def main() -> int:
    """Return 0 if every change was as promised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], metavar="PREFIX", help="prefixes of the names of the settings to change"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the nodes must not outlive this process
    folder = Path(tempfile.mkdtemp(prefix="ts", dir="/tmp"))  # Ray's sockets need a short path
    began = time.monotonic()
    rows = play(folder, options.only)
    print(table(rows))
    for (section, key), reason in NOT_TRIED.items():
        print(f"not tried: {section}.{key}: {reason}")
    problems = [f"{row.setting}: {one}" for row in rows for one in row.problems]
    print("\n".join(problems) or "every change was as promised")
    report = ROOT / "build" / "setting-changes.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    print(f"{len(rows)} changes in {time.monotonic() - began:.0f} s, {len(problems)} problems; written to {report}")
    if problems:
        print(f"logs are in {folder}")
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if problems or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
