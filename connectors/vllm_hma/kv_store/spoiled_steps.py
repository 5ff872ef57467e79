"""Count the steps that may compute KV from the blocks of a failed load."""

from __future__ import annotations


class SpoiledSteps:
    """Number of steps that vLLM may have scheduled with blocks of a failed load; True if any.

    The number includes the current step. Any request of such a step may read these blocks: vLLM's
    prefix cache has them once the load is ordered.

    ``batches``  number of steps that vLLM schedules before it reads the first one's output
    """

    def __init__(self, batches: int) -> None:
        self._batches = batches
        self._steps = 0

    def __bool__(self) -> bool:
        return self._steps > 0

    def load_failed(self) -> None:
        """Spoil the current step and those that vLLM may have scheduled already."""
        self._steps = self._batches

    def end_step(self) -> None:
        """End the current step. The connector calls this at the end of each `wait_for_save`."""
        self._steps = max(0, self._steps - 1)
