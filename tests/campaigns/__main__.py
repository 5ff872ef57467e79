"""Run the campaigns that decide a release, one after the other, and write one report: ``make test-all``.

    python -m tests.campaigns [--only identity families] [--again]

The report is ``build/test-all/<commit>/report.md``. A step that has passed on this commit is not run again, so an
interrupted run continues where it stopped. Each step is a target of the Makefile.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Step:
    """A target of the Makefile, its variables, and how many of its last lines belong in the report."""

    name: str
    target: str
    variables: tuple[str, ...] = ()
    lines: int = 6
    needs_root: bool = False


@dataclass(frozen=True)
class Outcome:
    """The end of one step: its exit status, duration, date and last lines of output."""

    step: str
    command: str
    status: int
    seconds: float
    date: str
    output: tuple[str, ...]


STEPS = (
    Step("test", "test", ("BUDGET_S=600",), lines=4),
    Step("manifests", "manifests"),
    Step("identity", "identity", lines=4),
    Step("families", "families", lines=40),
    Step("schedules", "schedules", ("SCHEDULES=20000",), lines=8),
    Step("corruption", "corruption", lines=2),
    Step("differential", "differential", lines=2),
    Step("fuzz", "fuzz", lines=6),
    Step("store-faults", "store-faults", lines=3),
    Step("store-schedules", "store-schedules", lines=3),
    Step("store-restart", "store-restart", lines=3),
    Step("clients", "clients", lines=20),
    Step("multi-connector", "multi-connector", lines=3),
    Step("two-hosts", "two-hosts-test", lines=12, needs_root=True),
    Step("faults-1-1", "faults", ("FAULTS=200", "TP=1:1", "LANES=2", "OUT=build/test-all/faults-1-1"), lines=2),
    Step("faults-1-2", "faults", ("FAULTS=200", "TP=1:2", "LANES=2", "OUT=build/test-all/faults-1-2"), lines=2),
    Step("fault-pairs", "fault-pairs", ("PAIRS_OUT=build/test-all/fault-pairs",), lines=2, needs_root=True),
    Step("stopped-rank", "stopped-rank", ("COUNT=50",), lines=2),
    Step("streams", "streams", lines=3),
    Step("rolling-restart", "rolling-restart", lines=4),
    Step("overlay-serves", "overlay-serves", lines=4),
    Step("explore", "explore", lines=3),
    Step("gpu-check", "gpu-check", lines=20),
)


def main(argv: list[str] | None = None) -> int:
    """Return 0 when every step has passed on this commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP", help=", ".join(names))
    parser.add_argument("--again", action="store_true", help="run also what has passed on this commit")
    options = parser.parse_args(argv)
    commit = _git("rev-parse", "--short=10", "HEAD")
    if _git("status", "--porcelain"):
        commit += "-modified"
    folder = ROOT / "build" / "test-all" / commit
    folder.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        earlier = _load(folder, step)
        if step.name not in options.only or (earlier is not None and earlier.status == 0 and not options.again):
            continue
        if step.needs_root and os.geteuid() != 0:
            print(f"{step.name}: skipped, needs root", flush=True)
            continue
        print(f"{step.name}: {_command(step)}; output in {_log(folder, step).relative_to(ROOT)}", flush=True)
        outcome = _run(step, folder)
        (folder / f"{step.name}.json").write_text(json.dumps(asdict(outcome), indent=1))
        _write_report(folder, commit)
        print(f"{step.name}: {'passed' if outcome.status == 0 else 'FAILED'}, {outcome.seconds:.0f} s", flush=True)
    print(f"report: {_write_report(folder, commit).relative_to(ROOT)}", flush=True)
    outcomes = [_load(folder, step) for step in STEPS]
    return 0 if all(outcome is not None and outcome.status == 0 for outcome in outcomes) else 1


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def _command(step: Step) -> str:
    return " ".join(("make", step.target, *step.variables))


def _log(folder: Path, step: Step) -> Path:
    return folder / f"{step.name}.log"


def _run(step: Step, folder: Path) -> Outcome:
    """Run a step in a process group of its own; an interrupt reaches the group and this process waits for its end."""
    date = datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds")
    began = time.monotonic()
    with _log(folder, step).open("wb") as log:
        command = ["make", "--no-print-directory", step.target, *step.variables]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGINT)
            process.wait()
            raise
    lines = [line.rstrip() for line in _log(folder, step).read_text(errors="replace").splitlines() if line.strip()]
    return Outcome(
        step.name, _command(step), status, round(time.monotonic() - began, 1), date, tuple(lines[-step.lines :])
    )


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
            lines.append(f"| {step.name} | `{_command(step)}` | | | not run |")
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
