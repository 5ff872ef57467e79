"""The background thread that keeps transfers moving while the engine computes or idles."""

from __future__ import annotations

import threading
from collections.abc import Callable

_JOIN_S = 5.0


class ProgressThread:
    """Calls ``turn`` again and again, with a rest of as many seconds as it returned, or until ``wake``.

    ``turn`` must not raise: its thread has all deadlines and answers. The thread calls ``on_start`` first.
    """

    def __init__(self, progress: Callable[[], float], first_rest_s: float, on_start: Callable[[], None]) -> None:
        self._progress = progress
        self._on_start = on_start
        self._rest_s = first_rest_s
        self._closed = threading.Event()
        self._awake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tandem-progress", daemon=True)

    def start(self) -> None:
        """Once, when all that ``turn`` needs is there."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def wake(self) -> None:
        """Take the next turn now."""
        self._awake.set()

    def close(self) -> None:
        """Take no further turn; wait for the one under way, but not for ever."""
        self._closed.set()
        self._awake.set()
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        self._on_start()
        while not self.closed:
            self._awake.wait(self._rest_s)
            self._awake.clear()
            self._rest_s = self._progress()
