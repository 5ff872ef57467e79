"""Decides how long a request may wait for its stored prefix before a transfer carries all of it.

The transfer carries what the store has not loaded, so waiting can only pay where a load takes less
time than the transfer of the same bytes. A request never waits longer than that transfer would
take: the wait at most doubles the time of these bytes. Sans-I/O: the caller measures.
"""

from __future__ import annotations

import math
from collections import deque

SAMPLES = 16
"""Measurements that count, of loads and of transfers."""


class MixCosts:
    """Measured rates of loads and transfers.

    A transfer's time includes prefill's computation, so the fastest one is the best estimate of the
    link. Loads have no such part: their mean counts.
    """

    def __init__(self) -> None:
        self._loads: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        self._transfers: deque[tuple[int, float]] = deque(maxlen=SAMPLES)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """Record a finished load, also one that has read nothing in time."""
        self._loads.append((size_bytes, seconds))

    def transferred(self, size_bytes: int, seconds: float) -> None:
        """Record a finished transfer."""
        if size_bytes > 0 and seconds > 0:
            self._transfers.append((size_bytes, seconds))

    def transfer_s(self, size_bytes: int) -> float:
        """Return the estimated time of a transfer; infinite before the first one."""
        return size_bytes * min((seconds / size for size, seconds in self._transfers), default=math.inf)

    def load_s(self, size_bytes: int) -> float:
        """Return the estimated time of a load; 0 before the first one."""
        seconds = sum(each[1] for each in self._loads)
        read = sum(each[0] for each in self._loads)
        if not seconds:
            return 0.0
        return size_bytes * seconds / read if read else math.inf

    def patience_s(self, size_bytes: int) -> float:
        """Return how long to wait for a load of so many bytes; 0 if the transfer is faster.

        Each refusal forgets the oldest load, so a tier that has recovered is used again.
        """
        transfer_s = self.transfer_s(size_bytes)
        if self.load_s(size_bytes) < transfer_s:
            return transfer_s
        if self._loads:
            self._loads.popleft()
        return 0.0
