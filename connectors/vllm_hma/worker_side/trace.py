"""Write one JSON line per transfer event to ``trace_path``, for benchmarks and debugging.

Times are ``time.monotonic()`` in seconds, a clock that all processes of a host share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from typing import IO

logger = logging.getLogger(__name__)


class Trace:
    """Does nothing if ``path`` is empty. Ranks and engines may share the file. Raises OSError."""

    def __init__(self, path: str, incarnation: str, rank: int) -> None:
        self._who = {"engine": incarnation, "rank": rank}
        # Short lines in append mode: lines of several processes do not mix.
        self._stream: IO[str] | None = open(path, "a", encoding="utf-8", buffering=1) if path else None  # noqa: SIM115

    def event(self, name: str, **fields: object) -> None:
        if self._stream is None:
            return
        record = {"t": time.monotonic(), "event": name, **self._who, **fields}
        try:
            self._stream.write(json.dumps(record) + "\n")
        except OSError as error:
            logger.warning("Tandem: cannot write to the trace file (trace_path), so this rank's trace ends: %s", error)
            self.close()

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            # After a failed write, close() retries it and may fail again.
            with contextlib.suppress(OSError):
                stream.close()
