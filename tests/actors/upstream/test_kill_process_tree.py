"""An engine's processes can be killed even if some of them end meanwhile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from vllm.v1 import utils

from actors.upstream.vllm_processes.kill_process_tree import ignore_ended_processes

PARENT = """
import subprocess, time
child = subprocess.Popen(["sleep", "300"])
print(child.pid, flush=True)
child.wait()
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def workaround(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "kill_process_tree", utils.kill_process_tree)
    ignore_ended_processes()


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def _child(parent: subprocess.Popen[str]) -> psutil.Process:
    assert parent.stdout is not None
    return psutil.Process(int(parent.stdout.readline()))


def test_a_process_that_ends_meanwhile_is_no_error(
    parent: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is reaped after vLLM has found it and before it has read its children."""
    child = _child(parent)
    children = psutil.Process.children

    def after_the_end(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        parent.kill()
        parent.wait(10)
        return children(process, recursive)

    monkeypatch.setattr(psutil.Process, "children", after_the_end)
    utils.kill_process_tree(parent.pid)
    child.kill()


@pytest.mark.parametrize("ends", [True, False])
def test_a_child_that_ends_meanwhile_does_not_save_its_parent(
    parent: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    child = _child(parent)
    children = psutil.Process.children

    def before_its_end(process: psutil.Process, recursive: bool = False) -> list[psutil.Process]:
        found = children(process, recursive)
        if ends:
            child.kill()
            psutil.wait_procs([child], 10)
        return found

    monkeypatch.setattr(psutil.Process, "children", before_its_end)
    utils.kill_process_tree(parent.pid)
    assert parent.wait(10) < 0
    assert psutil.wait_procs([child], 10)[1] == []
