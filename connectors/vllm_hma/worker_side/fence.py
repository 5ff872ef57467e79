"""When has the device really computed what a step has submitted?

On an accelerator the forward pass returns before its kernels have run. A chunk may be read only after an event that
was recorded behind them has passed. On the CPU the forward has run when it returns.
"""

from __future__ import annotations

import torch


class StepFence:
    """``mark`` after a forward, ``passed`` when its results may be read by others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where the KV cache lies."""
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
