"""Device events after which the KV of a layer or a step can be read.

On an accelerator, the forward pass returns before its kernels have run. Its KV may be read only
after the device has reached an event that follows these kernels. On a CPU, the forward pass has
completed when it returns.
"""

from __future__ import annotations

import torch


class StepFence:
    """Mark at the end of a layer or a forward pass. Once ``passed`` is True, its KV can be read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def device(self) -> torch.device:
        return self._device

    def mark(self) -> torch.Event | None:
        """Return an event after the kernels queued so far by this thread; None on a CPU."""
        if self._device.type == "cpu":
            return None
        event = torch.Event(self._device)
        event.record()
        return event

    @staticmethod
    def passed(event: torch.Event | None) -> bool:
        return event is None or event.query()
