"""Calls and attributes fit what they name, in all of our Python: what a refactoring leaves behind is seen here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_types() -> None:
    """As `make check` has it; pyproject.toml says what is checked, and how."""
    checked = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
