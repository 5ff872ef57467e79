"""Run the suite and all campaigns that decide a release; write one report.

A step that has passed on this commit is not run again, so an interrupted run continues. Campaigns
without engines run at niceness 19 beside those that start engines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.campaigns.registry import CAMPAIGNS, Campaign
from tests.campaigns.runner import ROOT, commit

SUITE = Campaign("test", "", 8, (), "-", "the whole suite, with lint and types")
STEPS = (SUITE, *(one for one in CAMPAIGNS.values() if one.release is not None))
PATIENCE = 4
"""A campaign that takes this multiple of its duration is stopped: it hangs."""
PATIENCE_BESIDE = 12
"""The same for a campaign without engines, which gets only the time that the others leave."""


class Release:
    """One run; each step has its log and outcome in ``folder``."""

    def __init__(self, only: Sequence[str], whole: bool) -> None:
        self.name = commit()
        self.folder = ROOT / "build" / "test-all" / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._whole = whole
        self._todo = [step for step in STEPS if (not only or step.name in only) and not self._passed(step)]
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._interrupted = False

    def run(self) -> int:
        """Return 0 if every step has passed on this commit."""
        todo = [step for step in self._todo if not step.missing]
        lanes = ([step for step in todo if not step.computes], [step for step in todo if step.computes])
        with ThreadPoolExecutor(2) as threads:
            try:
                for lane in [threads.submit(self._run, steps) for steps in lanes]:
                    lane.result()
            except BaseException:
                with self._lock:
                    self._interrupted = True
                    for process in self._running:
                        process.terminate()
                raise
        print(f"report: {self._write().relative_to(ROOT)}", flush=True)
        return 0 if all(self._passed(step) for step in STEPS) else 1

    def command(self, step: Campaign) -> list[str]:
        if step is SUITE:
            return ["make", "--no-print-directory", "test"]
        options = () if self._whole else step.release or ()
        return [sys.executable, "-m", "tests.campaigns", step.name, *options]

    def _run(self, steps: Sequence[Campaign]) -> None:
        for step in steps:
            command = ["nice", "-n", "19", *self.command(step)] if step.computes else self.command(step)
            print(f"{step.name}: {' '.join(command[-3:])}", flush=True)
            began = time.monotonic()
            with (self.folder / f"{step.name}.log").open("wb") as log:
                with self._lock:
                    if self._interrupted:
                        return
                    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
                    self._running.add(process)
                try:
                    patience = PATIENCE_BESIDE if step.computes else PATIENCE
                    status = process.wait(None if self._whole else patience * 60 * step.minutes)
                except subprocess.TimeoutExpired:
                    process.terminate()
                    status = process.wait()
                with self._lock:
                    self._running.remove(process)
                    if self._interrupted:
                        return
            took = round(time.monotonic() - began)
            outcome = {"command": self.command(step), "status": status, "seconds": took, "found": self._found(step)}
            (self.folder / f"{step.name}.json").write_text(json.dumps(outcome, indent=1))
            self._write()
            print(f"{step.name}: {'passed' if status == 0 else f'FAILED ({status})'}, {took} s", flush=True)

    def _found(self, step: Campaign) -> list[str]:
        lines = (self.folder / f"{step.name}.log").read_text(errors="replace").splitlines()
        return [line.rstrip() for line in lines if line.strip()][-12:]

    def _load(self, step: Campaign) -> dict[str, Any] | None:
        file = self.folder / f"{step.name}.json"
        return json.loads(file.read_text()) if file.exists() else None

    def _passed(self, step: Campaign) -> bool:
        outcome = self._load(step)
        return outcome is not None and outcome["status"] == 0 and outcome["command"] == self.command(step)

    def _write(self) -> Path:
        lines = [f"# `make test-all` on {self.name}", "", f"{os.cpu_count()} cores.", ""]
        lines += ["| step | shows | seconds | result |", "|---|---|---|---|"]
        found = {step: self._load(step) for step in STEPS}
        for step, outcome in found.items():
            missing = f"not run, needs {step.needs}" if step.missing else "not run"
            result = (
                missing if outcome is None else "passed" if outcome["status"] == 0 else f"FAILED ({outcome['status']})"
            )
            lines.append(f"| {step.name} | {step.purpose} | {outcome['seconds'] if outcome else ''} | {result} |")
        for step, outcome in found.items():
            if outcome is not None:
                lines += ["", f"## {step.name}", "", f"    {' '.join(outcome['command'])}", ""]
                lines += ["```", *outcome["found"], "```"]
        path = self.folder / "report.md"
        path.write_text("\n".join(lines) + "\n")
        return path
