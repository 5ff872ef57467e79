"""Simulate another CPU for torch, for `make test CPU_FEATURES=amx_tile=0`.

The Makefile puts this folder on PYTHONPATH, so Python imports this module in every process of a
run, engines and Ray workers included. It replaces entries of `torch.cpu.get_capabilities()`, from
which vLLM chooses kernels. Compiled code that detects the CPU itself still detects the real CPU.
oneDNN reads its limit from an environment variable, which this module sets if AMX is disabled.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any

VARIABLE = "TANDEM_CPU_FEATURES"
"""Environment variable with capabilities by torch's names, such as `amx_tile=0,avx512_bf16=0`."""


def parse(text: str) -> dict[str, bool]:
    """Parse values by name. Raises ValueError for values other than 0 and 1."""
    pairs = [entry.partition("=") for entry in text.split(",") if entry]
    wrong = [f"{name}={value}" for name, _, value in pairs if value not in ("0", "1")]
    if wrong:
        raise ValueError(f"{VARIABLE}: a feature is 0 or 1, as in amx_tile=0: {', '.join(wrong)}")
    return {name: value == "1" for name, _, value in pairs}


class TorchCpuFinder:
    """Import finder for `torch.cpu` that patches the module after its execution."""

    def __init__(self, features: Mapping[str, bool]) -> None:
        self._features = features

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_patch(module: ModuleType) -> None:
            run(module)
            patch(module, self._features)

        spec.loader.exec_module = run_and_patch  # type: ignore[method-assign]
        return spec


def patch(torch_cpu: ModuleType, features: Mapping[str, bool]) -> None:
    """Replace `get_capabilities`, which torch's own predicates call.

    Raises ValueError for a feature that torch does not have.
    """
    found = torch_cpu.get_capabilities()
    unknown = features.keys() - found.keys()
    if unknown:
        raise ValueError(f"{VARIABLE}: torch has no CPU feature {', '.join(sorted(unknown))}")
    shown: Mapping[str, Any] = MappingProxyType(dict(found) | dict(features))
    torch_cpu.get_capabilities = lambda: shown  # type: ignore[attr-defined]


if os.environ.get(VARIABLE):
    FEATURES = parse(os.environ[VARIABLE])
    if FEATURES.get("amx_tile") is False:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    sys.meta_path.insert(0, TorchCpuFinder(FEATURES))
