"""Run the release campaigns one after the other and write one report: ``make test-all``.

    python -m tests.campaigns [--only identity families] [--whole] [--again]

The report is ``build/test-all/<commit>/report.md``. A step that has passed on this commit is not
run again, so an interrupted run continues. Each step is a target of the Makefile. Steps without
engines run one after the other at niceness 19, beside the steps that start engines. Long campaigns
have two sizes: one that fits into two hours, and, with ``--whole``, the size of the target itself.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NOISE = re.compile(
    r"resource_tracker|site-packages/|^\s|^\[?W\d{4} |\[transformers\]|\b(INFO|WARNING) \d\d-\d\d |NIXL INFO|"
    r"(checkpoint|model) shards:"
)
"""Log lines of engines and of Python, which would displace a campaign's own last lines."""

SILENT = os.environ | {"MAKEFLAGS": "--no-print-directory"}


@dataclass(frozen=True)
class Step:
    """A target of the Makefile, its variables, and the number of its last lines in the report.

    ``{folder}`` in a variable is the folder of this commit's report. ``size`` are variables that
    make the step shorter; ``--whole`` leaves them out. ``computes``: the step starts no engines, so
    it runs beside the steps that do. ``needs``: ``root``, or a program that must be on the path.
    """

    name: str
    target: str
    variables: tuple[str, ...] = ()
    size: tuple[str, ...] = ()
    lines: int = 6
    needs: str = ""
    computes: bool = False

    @property
    def can_run(self) -> bool:
        """Return whether this machine has what the step needs."""
        return os.geteuid() == 0 if self.needs == "root" else not self.needs or shutil.which(self.needs) is not None


@dataclass(frozen=True)
class Outcome:
    """Outcome of one step: exit status, duration, date and last lines of output."""

    step: str
    command: str
    status: int
    seconds: float
    date: str
    output: tuple[str, ...]


STEPS = (
    Step("test", "test", ("BUDGET_S=600",), lines=4),
    Step("manifests", "manifests", computes=True),
    Step("plans", "plans", lines=1, computes=True),
    Step("schedules", "schedules", size=("SCHEDULES=20000",), lines=8, computes=True),
    Step("corruption", "corruption", lines=2, computes=True),
    Step("store-faults", "store-faults", lines=3, computes=True),
    Step("store-schedules", "store-schedules", size=("STEPS=24000",), lines=3, computes=True),
    Step("gpu-check", "gpu-check", lines=20, computes=True),
    Step("explore", "explore", size=("PART=1/6",), lines=3, computes=True),
    Step("identity", "identity", size=("PROMPTS=50",), lines=4),
    Step("placement", "placement", lines=2),
    Step("data-parallel", "data-parallel", size=("PROMPTS=10", "KILLS=2"), lines=30),
    Step("fuzz", "fuzz", lines=6),
    Step("differential", "differential", lines=2),
    Step("seam", "seam", size=("COUNT=200", "KILLS=4"), lines=8),
    Step("clients", "clients", lines=20),
    Step("multi-connector", "multi-connector", lines=3),
    Step("store-restart", "store-restart", ("PROMPTS=100",), ("PROMPTS=12",), lines=10),
    Step("store-kills", "store-kills", size=("ONLY=llama", "RESTARTS=3"), lines=8),
    Step("serve-commands", "serve-commands", lines=2),
    Step("rolling-restart", "rolling-restart", size=("TIMES=1",), lines=4),
    Step("head-killed", "head-killed", lines=4, needs="redis-server"),
    Step("setting-changes", "setting-changes", size=("ONLY=decode",), lines=4),
    Step("overlay-serves", "overlay-serves", lines=4),
    Step("two-hosts", "two-hosts-test", lines=12, needs="root"),
    Step("faults-1-1", "faults", ("TP=1:1", "LANES=2", "OUT={folder}/faults-1-1"), ("FAULTS=50",), lines=2),
    # One lane: two pairs have six workers that spin, and a busy machine misses deadlines.
    Step("faults-1-2", "faults", ("TP=1:2", "OUT={folder}/faults-1-2"), ("FAULTS=50",), lines=2),
    Step(
        "fault-pairs",
        "fault-pairs",
        ("LANES=2", "PAIRS_OUT={folder}/fault-pairs"),
        ("FAULTS=20",),
        lines=2,
        needs="root",
    ),
    Step("stopped-rank", "stopped-rank", ("COUNT=50",), ("COUNT=10",), lines=2),
    Step("streams", "streams", size=("KILLS=5",), lines=3),
    Step("families", "families", size=("PROMPTS=4",), lines=40),
    Step("speculation", "speculation", size=("PROMPTS=10",), lines=10),
    Step("adapters", "adapters", lines=2),
    Step("images", "images", lines=3),
)


def main(argv: list[str] | None = None) -> int:
    """Return 0 if every step has passed on this commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP", help=", ".join(names))
    parser.add_argument("--whole", action="store_true", help="run long campaigns in full (a night)")
    parser.add_argument("--again", action="store_true", help="also run steps that have passed on this commit")
    options = parser.parse_args(argv)
    commit = _git("rev-parse", "--short=10", "HEAD")
    if _git("status", "--porcelain"):
        commit += "-modified"
    folder = ROOT / "build" / "test-all" / commit
    folder.mkdir(parents=True, exist_ok=True)
    todo = [step for step in STEPS if step.name in options.only]
    if not options.again:
        todo = [step for step in todo if not _has_passed(_load(folder, step), _command(step, folder, options.whole))]
    for step in todo:
        if not step.can_run:
            print(f"{step.name}: skipped, needs {step.needs}", flush=True)
    todo = [step for step in todo if step.can_run]
    campaigns = Campaigns(folder, commit, options.whole)
    suite = [step for step in todo if step.target == "test"]  # the suite has a time budget, so it runs alone
    engines = [step for step in todo if not step.computes and step not in suite]
    with ThreadPoolExecutor(2) as threads:
        try:
            threads.submit(campaigns.run, suite).result()
            running = [
                threads.submit(campaigns.run, steps) for steps in (engines, [step for step in todo if step.computes])
            ]
            for lane in running:
                lane.result()
        except BaseException:
            campaigns.interrupt()
            raise
    print(f"report: {_write_report(folder, commit).relative_to(ROOT)}", flush=True)
    outcomes = [_load(folder, step) for step in STEPS]
    return 0 if all(outcome is not None and outcome.status == 0 for outcome in outcomes) else 1


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _command(step: Step, folder: Path, whole: bool) -> list[str]:
    """Return the command of a step; a variable of its size comes last and overrides."""
    variables = (*step.variables, *(() if whole else step.size))
    return ["make", step.target, *(variable.format(folder=folder.relative_to(ROOT)) for variable in variables)]


def _has_passed(outcome: Outcome | None, command: list[str]) -> bool:
    return outcome is not None and outcome.status == 0 and outcome.command == " ".join(command)


def _log(folder: Path, step: Step) -> Path:
    return folder / f"{step.name}.log"


class Campaigns:
    """Runner of steps, each in its own process group. Two threads may run two lists of steps."""

    def __init__(self, folder: Path, commit: str, whole: bool) -> None:
        self._folder = folder
        self._commit = commit
        self._whole = whole
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._interrupted = False

    def run(self, steps: Iterable[Step]) -> None:
        """Run steps one after the other, and rewrite the report after each."""
        for step in steps:
            command = " ".join(_command(step, self._folder, self._whole))
            print(f"{step.name}: {command}; output in {_log(self._folder, step).relative_to(ROOT)}", flush=True)
            outcome = self._run_step(step)
            if outcome is None:
                return
            with self._lock:
                (self._folder / f"{step.name}.json").write_text(json.dumps(asdict(outcome), indent=1))
                _write_report(self._folder, self._commit)
            print(f"{step.name}: {'passed' if outcome.status == 0 else 'FAILED'}, {outcome.seconds:.0f} s", flush=True)

    def interrupt(self) -> None:
        """Interrupt the process groups of running steps; ``run`` starts no further step."""
        with self._lock:
            self._interrupted = True
            for process_group in self._running:
                os.killpg(process_group, signal.SIGINT)

    def _run_step(self, step: Step) -> Outcome | None:
        """Return the outcome; None for a step that was interrupted or not started."""
        date = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
        began = time.monotonic()
        command = _command(step, self._folder, self._whole)
        started = ["nice", "-n", "19", *command] if step.computes else command
        with _log(self._folder, step).open("wb") as log:
            with self._lock:
                if self._interrupted:
                    return None
                process = subprocess.Popen(
                    started, cwd=ROOT, env=SILENT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
                self._running.add(process.pid)
            status = process.wait()
            with self._lock:
                self._running.remove(process.pid)
                if self._interrupted:
                    return None
        lines = [line.rstrip() for line in _log(self._folder, step).read_text(errors="replace").splitlines()]
        last = tuple([line for line in lines if line and not NOISE.search(line)][-step.lines :])
        return Outcome(step.name, " ".join(command), status, round(time.monotonic() - began, 1), date, last)


def _load(folder: Path, step: Step) -> Outcome | None:
    try:
        found = json.loads((folder / f"{step.name}.json").read_text())
    except FileNotFoundError:
        return None
    return Outcome(**found | {"output": tuple(found["output"])})


def _write_report(folder: Path, commit: str) -> Path:
    """Write all outcomes of this commit as one page: a table, then the last lines of every step."""
    outcomes = {step.name: _load(folder, step) for step in STEPS}
    lines = [f"# `make test-all` on {commit}", "", f"{os.cpu_count()} cores.", ""]
    lines += ["| step | command | date | seconds | result |", "|---|---|---|---|---|"]
    for step in STEPS:
        outcome = outcomes[step.name]
        if outcome is None:
            lines.append(f"| {step.name} | | | | not run{'' if step.can_run else f', needs {step.needs}'} |")
            continue
        result = "passed" if outcome.status == 0 else f"FAILED ({outcome.status})"
        lines.append(f"| {step.name} | `{outcome.command}` | {outcome.date} | {outcome.seconds:.0f} | {result} |")
    for step in STEPS:
        if (outcome := outcomes[step.name]) is not None:
            lines += ["", f"## {step.name}", "", "```", *outcome.output, "```"]
    path = folder / "report.md"
    path.write_text("\n".join(lines) + "\n")
    return path


if __name__ == "__main__":
    sys.exit(main())
