"""Log lines that a hostile or broken peer cannot flood: of each kind one in a while, with how many it stands for."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_S = 10.0
_MAX_CHARACTERS = 500


class RateLimitedLog:
    """Thread-safe. ``kind`` is one of a few fixed words, never a peer's."""

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
