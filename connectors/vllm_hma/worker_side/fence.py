"""Fence between a step's computation and its readers.

On an accelerator the forward pass returns before its kernels have run. A chunk may be read only after an event
recorded behind them has completed. On the CPU the forward has completed when it returns.
"""

from __future__ import annotations

import torch


class StepFence:
    """``mark`` after a forward; its results may be read once ``passed``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """Return the device of the KV cache."""
        return self._device

    def mark(self) -> torch.Event | None:
        if self._device.type == "cpu":
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    @staticmethod
    def passed(event: torch.Event | None) -> bool:
        return event is None or event.query()
