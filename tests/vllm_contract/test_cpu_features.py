"""`make test CPU_FEATURES=...` simulates another CPU for torch in every process of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from testing.cpu_features.sitecustomize import VARIABLE

FEATURES = Path(__file__).resolve().parents[2] / "testing" / "cpu_features"
SHOW = "import torch; print(torch.cpu._is_amx_tile_supported(), torch.cpu._is_avx2_supported())"
SPAWN = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SHOW!r}], check=True)"
AVX2 = torch.cpu._is_avx2_supported()  # noqa: SLF001 (the function that vLLM asks)


@pytest.mark.parametrize(
    ("features", "code", "seen"),
    [
        ("amx_tile=1", SHOW, f"True {AVX2}"),
        ("amx_tile=0", SHOW, f"False {AVX2}"),
        ("amx_tile=1,avx2=0", SPAWN, "True False"),
    ],
)
def test_features_are_shown(features: str, code: str, seen: str) -> None:
    path = os.pathsep.join([str(FEATURES), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, VARIABLE: features}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert ended.stdout.strip() == seen, ended.stderr
