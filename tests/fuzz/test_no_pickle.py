"""Tandem never unpickles, evaluates or loads network input as code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "yaml"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "recv_pyobj", "send_pyobj", "load_module"}
ALLOWED = {
    # The operator's configuration file, with safe_load.
    "app/run.py": {"yaml"},
    "app/show_config.py": {"yaml"},  # safe_dump
}


def sources() -> list[Path]:
    return sorted(
        path for package in ("app", "actors", "configs", "connectors") for path in (ROOT / package).rglob("*.py")
    )


def used(path: Path) -> set[str]:
    """Return modules imported and functions called by name, anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Import():
                names |= {alias.name.split(".")[0] for alias in node.names}
            case ast.ImportFrom():
                names.add((node.module or "").split(".")[0])
            case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
                names.add(name)
    return names


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_source_of_ours_unpickles(path: Path) -> None:
    """Agent metadata and messages are JSON and vectors of integers; numpy's object loader is not
    called.
    """
    found = used(path) & (FORBIDDEN_MODULES | FORBIDDEN_CALLS)
    if "compile" in found and "re" in used(path):
        found.discard("compile")
    assert found <= ALLOWED.get(str(path.relative_to(ROOT)), set())
    assert "allow_pickle" not in path.read_text(encoding="utf-8")


def test_the_check_sees_what_it_looks_for(tmp_path: Path) -> None:
    """A file that does each of these is detected."""
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle as p\nfrom cloudpickle import loads\nsocket.recv_pyobj()\neval('1')\n")
    assert {"pickle", "cloudpickle", "recv_pyobj", "eval"} <= used(bad)
