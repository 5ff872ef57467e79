"""Virtual time for tests whose tasks only sleep and wait for each other."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from connectors.logs import PACKAGES


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """Capture lines of Tandem's packages, which vLLM's plugin sends to vLLM's log only."""
    for name in PACKAGES:
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)
    return caplog


@pytest.fixture
async def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock of this test's event loop only when every task waits, to the next timer.

    A pause of the machine takes no time on that clock: all tasks run as far as they can before a
    timeout expires. `time.monotonic` is the same clock. Not for tests that use sockets, threads or
    other processes.
    """
    loop: Any = asyncio.get_running_loop()
    select, now = loop._selector.select, time.monotonic()  # noqa: SLF001 - asyncio has no public clock

    def advance(timeout_s: float | None) -> Any:
        nonlocal now
        events = select(timeout_s and 0)
        if not events and timeout_s:
            now += timeout_s
        return events

    def monotonic() -> float:
        nonlocal now
        now += 1e-6  # no two events have one time
        return now

    monkeypatch.setattr(loop._selector, "select", advance)  # noqa: SLF001
    monkeypatch.setattr(time, "monotonic", monotonic)
