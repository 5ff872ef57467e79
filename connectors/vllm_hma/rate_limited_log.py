"""Log that a hostile or broken peer cannot flood: one line per kind and interval, with the number of lines omitted."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_S = 10.0
_MAX_CHARACTERS = 500


class RateLimitedLog:
    """Thread-safe. ``kind`` is one of a few constants, never a peer's text."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._kinds: dict[str, tuple[float, int]] = {}

    def __call__(self, kind: str, message: str) -> None:
        with self._lock:
            now = time.monotonic()
            since, left_out = self._kinds.get(kind, (float("-inf"), 0))
            if now - since < _EVERY_S:
                self._kinds[kind] = (since, left_out + 1)
                return
            self._kinds[kind] = (now, 0)
        more = f" (and {left_out} more like it)" if left_out else ""
        self._logger.warning("Tandem: %s%s", message[:_MAX_CHARACTERS], more)
