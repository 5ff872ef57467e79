"""Rate-limited log, so that a hostile or broken peer cannot flood the engine's log."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_S = 10.0
_MAX_CHARACTERS = 500


class RateLimitedLog:
    """Writes at most one line per kind in _EVERY_S seconds. Thread-safe.

    A line has at most _MAX_CHARACTERS of its message, and the number of lines omitted before it.

    ``kind`` must be one of a few constants, never text from a peer.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}

    def __call__(self, kind: str, message: str) -> None:
        with self._lock:
            now = time.monotonic()
            since, omitted = self._kinds.get(kind, (float("-inf"), 0))
            if now - since < _EVERY_S:
                self._kinds[kind] = (since, omitted + 1)
                return
            self._kinds[kind] = (now, 0)
        more = f" ({omitted} similar messages omitted)" if omitted else ""
        self._logger.warning("Tandem: %s%s", message[:_MAX_CHARACTERS], more)
