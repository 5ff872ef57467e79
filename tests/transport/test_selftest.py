"""The transfer between two processes reports each failure as `error`, and leaves no process."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from connectors.transport import selftest


def started_with(folder: Path, code: str) -> dict[str, str]:
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": str(folder)}


def running() -> list[list[str]]:
    """Return the commands of the selftest's processes that this process has started."""
    mine = [one.info for one in psutil.process_iter(["ppid", "cmdline"]) if one.info["ppid"] == os.getpid()]
    return [one["cmdline"] for one in mine if selftest.__name__ in (one["cmdline"] or ())]


def test_a_sender_that_dies_before_the_receiver_is_ready() -> None:
    """The parent writes to it before it reads its end."""
    environments = {"sender": {"PYTHONHOME": "/nowhere"}, "receiver": {}}
    report = selftest.run(["UCX"], [], 30.0, environments, show=False)
    assert report["error"].startswith("the sender ended with status 1: ")


@pytest.mark.parametrize(
    ("code", "limit", "error"),
    [
        ("import time; time.sleep(3600)", "START_S", "sent no result"),
        ("import os, time; os.close(1); time.sleep(3600)", "END_S", "did not end"),
    ],
)
def test_a_process_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, limit: str, error: str
) -> None:
    monkeypatch.setattr(selftest, limit, 0.1)
    environments = {"sender": {}, "receiver": started_with(tmp_path, code)}
    assert error in selftest.run(["UCX"], [], 30.0, environments, show=False)["error"]
    assert running() == []


@pytest.mark.parametrize("ends", [["sender"], ["receiver"], ["sender", "receiver"]])
def test_memory_of_gpus(ends: list[str]) -> None:
    """GPU memory is registered, written and compared; without a GPU the process says why not."""
    report = selftest.run(["UCX"], [], 30.0, {"sender": {}, "receiver": {}}, show=False, on_gpu=ends)
    if torch.cuda.is_available():
        assert "error" not in report
        assert report["bytes"] == selftest.TRANSFER_BYTES
    else:
        assert report["error"] == f"the {ends[-1]}: torch finds no CUDA GPU"
