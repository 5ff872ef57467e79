"""`make test CPU_FEATURES=...` simulates another CPU for torch and vLLM in every process of a
run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from testing.cpu_features.sitecustomize import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
SHOW = "import torch; print(torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx2_supported())"
SPAWN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}], check=True)"


def run(features: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python in an environment with these features, as the Makefile sets it."""
    path = os.pathsep.join([str(ROOT / "testing" / "cpu_features"), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, VARIABLE: features}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("features", "code", "seen"),
    [
        ("amx_tile=1", SHOW, f"True {torch.cpu._is_avx2_supported()}"),  # noqa: SLF001 (the function that vLLM asks)
        ("amx_tile=0", SHOW, f"False {torch.cpu._is_avx2_supported()}"),  # noqa: SLF001 (the function that vLLM asks)
        ("amx_tile=1,avx2=0", SPAWN, "True False"),
    ],
)
def test_features_are_shown(features: str, code: str, seen: str) -> None:
    """torch sees the features, also in child processes."""
    ended = run(features, code)
    assert ended.stdout.strip() == seen, ended.stderr
