"""The routing policy is pure: no clock, no wait, no Ray, in any importing module."""

import subprocess
import sys
from pathlib import Path

import actors.policy
from testing.imports import imported

FORBIDDEN = {"time", "datetime", "threading", "asyncio", "socket", "os", "subprocess", "multiprocessing", "random"}
SOURCES = sorted(Path(actors.policy.__path__[0]).glob("*.py"))


def test_sources_import_no_clock_and_no_service():
    for path in SOURCES:
        tops = {name.split(".")[0] for name in imported(path)}
        assert not tops & FORBIDDEN, path.name
        assert tops <= {*sys.stdlib_module_names, "numpy", "xxhash", "actors", "configs"}, path.name
        assert all(name.startswith("actors.policy") for name in imported(path) if name.startswith("actors"))


def test_a_fresh_interpreter_finds_no_ray():
    modules = ", ".join(f"actors.policy.{path.stem}" for path in SOURCES if path.stem != "__init__")
    run = [sys.executable, "-c", f"import sys, {modules}; print(*sys.modules)"]
    loaded = subprocess.run(run, capture_output=True, text=True, check=True, timeout=120).stdout
    assert not {name.split(".")[0] for name in loaded.split()} & {"ray", "vllm", "torch", "nixl", "starlette"}
