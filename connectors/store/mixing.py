"""Decide how long a decode request may wait for its stored prefix before its transfer starts.

A *load* reads stored KV of the prompt from files; the prefill engine then transfers only KV that
was not loaded. Waiting pays only if the load takes less time than the transfer of the same bytes.
Once transfers have been measured, the wait is at most the estimated transfer time of the same
bytes, so these bytes take at most about twice as long. Sans-I/O: the caller measures.
"""

from __future__ import annotations

import math
from collections import deque

SAMPLES = 16
"""Maximum number of latest loads, and of latest transfers, that the estimates use."""


class MixCosts:
    """Measured rates of loads and transfers.

    The time of a transfer includes prefill's computation, so the fastest transfer estimates the
    link's rate. The time of a load includes no computation, so the mean rate estimates loads.
    """

    def __init__(self) -> None:
        self._loads: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        self._transfers: deque[tuple[int, float]] = deque(maxlen=SAMPLES)

    def loaded(self, size_bytes: int, seconds: float) -> None:
        """Record the usable bytes and the duration of an ended load.

        0 bytes if the request can use none of what the load read.
        """
        self._loads.append((size_bytes, seconds))

    def transferred(self, size_bytes: int, seconds: float) -> None:
        """Record the bytes and duration of a finished transfer; ignore it if either is 0."""
        if size_bytes > 0 and seconds > 0:
            self._transfers.append((size_bytes, seconds))

    def transfer_s(self, size_bytes: int) -> float:
        """Return the estimated seconds of a transfer; infinite before the first transfer."""
        return size_bytes * min((seconds / size for size, seconds in self._transfers), default=math.inf)

    def load_s(self, size_bytes: int) -> float:
        """Return the estimated seconds of a load of ``size_bytes``.

        0 without recorded loads; infinite if none of them read any bytes.
        """
        seconds = sum(each[1] for each in self._loads)
        read = sum(each[0] for each in self._loads)
        if not seconds:
            return 0.0
        return size_bytes * seconds / read if read else math.inf

    def patience_s(self, size_bytes: int) -> float:
        """Return the longest time to wait for a load of ``size_bytes``, in seconds.

        The result is the estimated time of a transfer of the same bytes, or 0 if the load would
        take at least as long. Each 0 discards the oldest recorded load, so a tier that recovers is
        used again. Before the first transfer the result is infinite, or 0 if loads are recorded and
        all of them have 0 bytes.
        """
        transfer_s = self.transfer_s(size_bytes)
        if self.load_s(size_bytes) < transfer_s:
            return transfer_s
        if self._loads:
            self._loads.popleft()
        return 0.0
