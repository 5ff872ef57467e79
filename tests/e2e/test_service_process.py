"""The campaigns' service process leaves nothing behind if it is stopped during its start."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from testing.service_process import ServiceProcess, write_config


def test_a_start_that_is_interrupted_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupted start ends its process, to which the caller has no reference yet."""

    def interrupted(_: float) -> None:
        raise SystemExit(143)

    others = set(psutil.Process(os.getpid()).children())
    service = ServiceProcess(write_config("local.yaml", tmp_path), tmp_path)
    monkeypatch.setattr(time, "sleep", interrupted)
    try:
        with pytest.raises(SystemExit):
            service.start()
        assert set(psutil.Process(os.getpid()).children()) <= others
    finally:
        monkeypatch.undo()
        service.stop()
