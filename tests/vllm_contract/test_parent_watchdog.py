"""An engine core ends when its parent is killed: real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PARENT = """
import multiprocessing, sys, time
from tests.vllm_contract.test_parent_watchdog import child

if __name__ == "__main__":
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child, daemon=True)
    process.start()
    time.sleep(600)
"""


def child() -> None:
    """Act like an engine core that creates its connector."""
    import time

    from connectors.vllm_hma.upstream.parent_watchdog import end_with_parent

    end_with_parent()
    print("waiting", flush=True)
    time.sleep(600)


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path: Path, method: str) -> None:
    """The child ends for both of vLLM's start methods."""
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, str(script), method],
        cwd=root,
        env={"PYTHONPATH": str(root)},
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        try:
            assert parent.stdout.readline() == "waiting\n"
            family = psutil.Process(parent.pid).children(recursive=True)
        finally:
            parent.kill()
        _, left = psutil.wait_procs(family, timeout=30)
        for process in left:
            process.kill()
    assert left == []


def test_a_process_of_its_own_is_left_alone() -> None:
    """An engine in its caller's process does not end with the caller's shell."""
    code = (
        "from connectors.vllm_hma.upstream.parent_watchdog import end_with_parent; import threading;"
        "end_with_parent();"
        "print([thread.name for thread in threading.enumerate()])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "tandem-parent-watchdog" not in run.stdout
