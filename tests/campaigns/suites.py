"""Campaigns that are programs of their own, or tests that have a longer form."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from testing import ray_llm
from tests.campaigns.runner import ROOT, Report

NOISE = re.compile(r"resource_tracker|site-packages/|^\s|\b(INFO|WARNING) \d\d-\d\d |NIXL INFO|shards:")
"""Log lines of engines, which would displace a program's own last lines."""


def program(report: Report, *words: str, lines: int = 8, **environment: str) -> None:
    """Run a Python module with these words; its last lines are the row, a failure is a problem."""
    command = [sys.executable, "-m", *words]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    (report.folder / "output.log").write_text(ran.stdout)
    last = [line.rstrip() for line in ran.stdout.splitlines() if line.strip() and not NOISE.search(line)][-lines:]
    report.row(command=" ".join(words), status=ran.returncode, output=last)
    report.check(ran.returncode == 0, f"{' '.join(words)} ended with {ran.returncode}: {' | '.join(last[-3:])}")


def plans(report: Report) -> None:  # the release run limits its time, and that of `corruption`
    program(report, "pytest", "-q", "--timeout=0", "tests/planning/test_oracle.py", TANDEM_PLANS="1")


def corruption(report: Report) -> None:
    program(report, "pytest", "-q", "--timeout=0", "tests/transport/test_corruption.py", TANDEM_CORRUPTION="1")


def placement(report: Report) -> None:
    program(report, "pytest", "-q", "tests/app/test_deployment_options.py", TANDEM_PLACEMENT="1")


def ray_serve_llm(report: Report) -> None:
    if not (ROOT / ray_llm.PYTHON).exists():
        subprocess.run(["make", ray_llm.PYTHON], cwd=ROOT, check=True)
    program(report, "pytest", "-q", "tests/e2e/test_ray_serve_llm.py")
