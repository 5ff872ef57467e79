"""Rate-limited log, so that a hostile or broken peer cannot flood the engine's log."""

from __future__ import annotations

import logging
import threading
import time

_EVERY_S = 10.0
_MAX_CHARACTERS = 500


class RateLimitedLog:
    """Log of at most one warning per kind in _EVERY_S seconds. Thread-safe.

    A warning has at most _MAX_CHARACTERS of its message, and the number of messages of its kind
    omitted since the last warning.

    ``kind`` must be one of a few constants, never text from a peer: the state of each kind is kept.
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
        self._logger.warning("Tandem: %s%s", message[:_MAX_CHARACTERS], more, stacklevel=2)
