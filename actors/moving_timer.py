"""Timer whose deadline moves with each token of a stream."""

import asyncio
from collections.abc import Callable

RESOLUTION_S = 0.001
"""Resolution of uvloop's clock and timers in seconds; a deadline may expire this much early."""


class MovingTimer:
    """Timer that calls `expired` at its deadline, once for each deadline.

    A new deadline after the current one starts no timer of the event loop; `asyncio.timeout` would
    start one and cancel one for each token.
    """

    def __init__(self, expired: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._expired = expired
        self._due_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = 0.0
        """Time of `_timer`; uvloop's handle has none if its delay is less than a millisecond."""

    def set(self, due_at: float | None) -> None:
        """Set the deadline on the event loop's clock; None: no deadline."""
        self._due_at = due_at
        if due_at is None or (self._timer is not None and self._fires_at <= due_at):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._start(due_at)

    def close(self) -> None:
        self._due_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        due_at = self._due_at
        if due_at is None:
            return
        if self._loop.time() < due_at - RESOLUTION_S:
            self._start(due_at)
            return
        self._due_at = None
        self._expired()

    def _start(self, at: float) -> None:
        self._fires_at = at
        self._timer = self._loop.call_at(at, self._look)
