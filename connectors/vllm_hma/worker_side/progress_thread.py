"""Background thread of a worker that advances transfers while the engine computes or idles."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

_JOIN_S = 5.0


class ProgressThread:
    """Thread that calls ``on_start`` once, then ``progress`` in a loop.

    ``progress`` returns the pause before its next call, in seconds; ``wake`` ends the pause.
    ``progress`` must not raise: this thread checks all deadlines and answers peers.
    """

    def __init__(self, progress: Callable[[], float], first_rest_s: float, on_start: Callable[[], None]) -> None:
        self._progress = progress
        self._on_start = on_start
        self._rest_s = first_rest_s
        self._closed = threading.Event()
        self._awake = threading.Event()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="tandem-progress", daemon=True)

    def start(self) -> None:
        """Start the thread. Raises the error of ``on_start``, or RuntimeError if none can start."""
        self._thread.start()
        self._started.result()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def wake(self) -> None:
        self._awake.set()

    def close(self) -> None:
        """Wait at most _JOIN_S seconds for a running call of ``progress``."""
        self._closed.set()
        self._awake.set()
        self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        try:
            self._on_start()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        while not self.closed:
            self._awake.wait(self._rest_s)
            self._awake.clear()
            self._rest_s = self._progress()
