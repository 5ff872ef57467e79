"""The device of a check: its memory kind for NIXL, a kernel that keeps it busy, synchronisation."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import torch

from connectors.planning.layout import MemoryKind

DEADLINE_S = 60.0
BUSY_CYCLES = 2_000_000_000
Found = TypeVar("Found")


def memory_kind_of(device: torch.device) -> MemoryKind:
    return MemoryKind("DRAM", 0) if device.type == "cpu" else MemoryKind("VRAM", device.index or 0)


def set_current(device: torch.device) -> None:
    """Make ``device`` current in this thread with its context, as
    ``vllm_hma.worker_side.accelerator`` does.
    """
    if device.type != "cpu":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)


def synchronize(device: torch.device) -> None:
    """Wait for all queued work of the device. NIXL does not order writes by CUDA streams."""
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def keep_busy(device: torch.device, share: float = 1.0) -> None:
    """Queue a kernel of about ``share`` seconds on the current stream; nothing on a CPU."""
    if device.type != "cpu":
        torch.cuda._sleep(int(share * BUSY_CYCLES))  # noqa: SLF001 (torch's own tests use it; nothing public sleeps)


def until(condition: Callable[[], Found], what: str) -> Found:
    """Poll ``condition`` until it returns something true. Raises TimeoutError after DEADLINE_S."""
    give_up_at = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"{what}: not within {DEADLINE_S:g} s")
        time.sleep(0)
    return found
