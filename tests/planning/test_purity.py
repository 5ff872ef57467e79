"""Planning and protocol stay pure: their imports, in a fresh interpreter and in their source."""

import ast
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import connectors.planning
import connectors.protocol
import connectors.store.keys
import connectors.store.planning
from testing.imports import imported

PACKAGES = (connectors.planning, connectors.protocol, connectors.store.planning, connectors.store.keys)
HEAVY = ("torch", "vllm", "nixl", "ray", "zmq", "cryptography", "prometheus_client", "pydantic")

IMPORT_ALL = """
import importlib, pkgutil, sys
import connectors.planning, connectors.protocol, connectors.store.keys, connectors.store.planning
for package in (connectors.planning, connectors.protocol, connectors.store.keys, connectors.store.planning):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
print(" ".join(sorted(sys.modules)))
"""


def sources() -> list[Path]:
    return sorted(path for package in PACKAGES for path in Path(package.__path__[0]).rglob("*.py"))


def test_a_fresh_interpreter_finds_nothing_heavy() -> None:
    """Importing every module of both packages loads no engine, no transport, no service."""
    root = Path(connectors.planning.__path__[0]).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True, check=True, cwd=root, timeout=120
    )
    loaded = set(done.stdout.split())
    assert {f"connectors.planning.{name}" for name in ("layout", "heads", "blocks", "plan", "verify")} <= loaded
    assert {f"connectors.protocol.{name}" for name in ("wire", "agent_metadata", "producer", "consumer")} <= loaded
    assert not {name.split(".")[0] for name in loaded} & set(HEAVY)
    impure = ("connectors.transport", "connectors.vllm_hma", "connectors.store.tiers", "connectors.store.service")
    assert not {name for name in loaded if name.startswith(impure)}


@pytest.mark.parametrize("path", sources(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_sources_import_little(path: Path) -> None:
    """Sources import the standard library, numpy and pure packages, planning no protocol."""
    ours: tuple[str, ...] = ("connectors.errors", "connectors.planning")
    if path.parent.name == "protocol":
        ours += ("connectors.protocol",)
    if path.parent.parent.name == "store":
        ours += ("connectors.store.planning", *(("connectors.store.keys",) if path.parent.name == "keys" else ()))
    for name in imported(path):
        top = name.split(".")[0]
        assert top in sys.stdlib_module_names or top == "numpy" or name.startswith(ours), f"{path.name}: {name}"


@pytest.mark.parametrize("path", sources(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_clocks_threads_or_sockets(path: Path) -> None:
    """Sans-I/O: time is a parameter ``now``; the code does not wait, send or read the
    environment.
    """
    forbidden = {"time", "datetime", "threading", "asyncio", "socket", "os", "subprocess", "multiprocessing", "random"}
    assert not {name.split(".")[0] for name in imported(path)} & forbidden


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_package_files_hold_a_docstring(package: ModuleType) -> None:
    """``__init__`` describes the package and imports nothing."""
    tree = ast.parse(Path(package.__path__[0], "__init__.py").read_text(encoding="utf-8"))
    assert ast.get_docstring(tree)
    assert len(tree.body) == 1


def test_modules_stay_readable() -> None:
    """No file grows beyond 450 lines."""
    long = {path.name: len(path.read_text().splitlines()) for path in sources()}
    assert not {name: lines for name, lines in long.items() if lines > 450}
