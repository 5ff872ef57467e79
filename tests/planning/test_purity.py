"""Planning and protocol stay pure: their imports, in a fresh interpreter and in their source."""

import subprocess
import sys
from pathlib import Path

import pytest

from testing.imports import imported

ROOT = Path(__file__).parents[2]
PACKAGES = ("connectors.planning", "connectors.protocol", "connectors.store.planning", "connectors.store.keys")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package.replace(".", "/")).rglob("*.py"))
IMPURE = {"time", "datetime", "threading", "asyncio", "socket", "os", "subprocess", "multiprocessing", "random"}


def test_a_fresh_interpreter_loads_no_engine() -> None:
    """Importing all modules loads no engine, no transport, no service."""
    modules = [str(path.relative_to(ROOT).with_suffix("")).replace("/", ".") for path in SOURCES]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    loaded = set(done.stdout.split())
    assert {*modules} <= loaded | {f"{package}.__init__" for package in PACKAGES}
    heavy = {"torch", "vllm", "nixl", "ray", "zmq", "cryptography", "prometheus_client", "pydantic"}
    assert not {name.split(".")[0] for name in loaded} & heavy
    impure = ("connectors.transport", "connectors.vllm_hma", "connectors.store.tiers", "connectors.store.service")
    assert not {name for name in loaded if name.startswith(impure)}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_sources_import_little(path: Path) -> None:
    """The standard library without clocks and I/O, numpy, and pure packages below their own."""
    package = ".".join(path.parent.relative_to(ROOT).parts)
    ours = {
        "connectors.planning": ("connectors.errors", "connectors.planning"),
        "connectors.protocol": ("connectors.errors", "connectors.planning", "connectors.protocol"),
        "connectors.store.planning": ("connectors.errors", "connectors.planning", "connectors.store.planning"),
        "connectors.store.keys": (
            "connectors.errors",
            "connectors.planning",
            "connectors.protocol",
            "connectors.store",
        ),
    }[package]
    for name in imported(path):
        top = name.split(".")[0]
        pure = top in sys.stdlib_module_names and top not in IMPURE
        assert pure or top == "numpy" or name.startswith(ours), f"{path.name}: {name}"
