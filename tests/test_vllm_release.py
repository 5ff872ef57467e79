"""`make check-vllm`, on releases of this test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from testing.source_digests import source_of
from tests.campaigns.vllm_release import ROOT, Read, find, guarded, imported, report, surface

CHANGED = "vllm/v1/utils.py:shutdown"
GONE = "vllm/v1/engine/output_processor:OutputProcessor"


def release(changed: Mapping[str, tuple[str, str]]) -> Read:
    """Return a release that is the installed one but for one replacement in each of some files."""
    return lambda path: source_of(path).replace(*changed.get(path, ("", "")))


@pytest.fixture(scope="module")
def new() -> Read:
    return release(
        {
            "vllm/v1/utils.py": ("def shutdown(", "def shutdown(one=1, *, "),
            "vllm/v1/engine/output_processor.py": ("class OutputProcessor:", "class OtherProcessor:"),
        }
    )


def test_all_symbols_are_in_the_installed_release() -> None:
    symbols = guarded() | imported()
    assert len(guarded()) > 30
    assert len(symbols) > 100
    assert "connectors/vllm_hma/model/weights.py" in symbols["vllm/envs:VLLM_CACHE_ROOT"], "used by its module's name"
    assert [symbol for symbol in symbols if find(source_of, symbol) is None] == []


def test_changes_are_reported_until_they_have_a_verdict(new: Read, tmp_path: Path) -> None:
    """A verdict is kept for the same code, and dropped when the code changes again."""
    unread = report("1.0", source_of, new, tmp_path, tmp_path)
    assert f"{CHANGED} (actors/upstream/vllm_processes/kill_process_tree.py)" in unread
    path = tmp_path / "1.0.yaml"
    found = yaml.safe_load(path.read_text())
    assert found["changed"][GONE]["new_code"] == "gone"
    assert "+def shutdown(one=1, *, " in (tmp_path / "1.0.diff").read_text()
    for each in found["changed"].values():
        each["verdict"] = "compatible"
    path.write_text(yaml.safe_dump(found))
    assert report("1.0", source_of, new, tmp_path, tmp_path) == []
    again = release({"vllm/v1/utils.py": ("def shutdown(", "def shutdown(two=2, *, ")})
    assert [each.partition(" ")[0] for each in report("1.0", source_of, again, tmp_path, tmp_path)] == [CHANGED]


def test_the_same_release_has_no_changes(tmp_path: Path) -> None:
    assert report("1.0", source_of, source_of, tmp_path, tmp_path) == []
    assert yaml.safe_load((tmp_path / "1.0.yaml").read_text())["changed"] == {}


def test_a_surface_is_what_callers_see() -> None:
    """It has parameters, results, decorators and fields, and no code."""
    lines = (
        "@frozen",
        "class A(B, kind=C):",
        "    x: int = 1",
        "    @property",
        "    def f(self, y=2) -> int:",
        "        return 3",
        "    async def g(self): ...",
        "    def _h(self): ...",
    )
    files = {"vllm/a/__init__.py": "from .b import A", "vllm/a/b.py": "\n".join(lines)}

    def read(path: str) -> str:
        try:
            return files[path]
        except KeyError:
            raise FileNotFoundError(path) from None

    found = find(read, "vllm/a:A")
    assert found is not None
    assert surface(found) == [*lines[:5], "    async def g(self):"]
    assert find(read, "vllm/a:Missing") is None


@pytest.mark.parametrize(
    ("version", "environment", "sentence"),
    [
        ("99.0.0", {"PIP_NO_INDEX": "1"}, "pip has no wheel of vLLM 99.0.0 for this machine"),
        ("not a version", {"PIP_NO_INDEX": "1"}, "Invalid requirement"),
        ("0.33.0", {"PIP_INDEX_URL": "https://127.0.0.1:9/simple"}, "pip cannot reach its package index"),
    ],
)
def test_a_release_that_cannot_be_had(version: str, environment: dict[str, str], sentence: str) -> None:
    command = [sys.executable, "-m", "tests.campaigns.vllm_release", version]
    variables = {"PATH": "/usr/bin:/bin", "PIP_CONFIG_FILE": "/dev/null", **environment}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert sentence in done.stderr
