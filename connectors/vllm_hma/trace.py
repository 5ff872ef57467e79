"""One JSON line per transfer event, for benchmarks and debugging; off unless ``trace_path`` is set.

Times are ``time.monotonic()``, which all processes of one host share.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from typing import IO

logger = logging.getLogger(__name__)


class Trace:
    """Appends to a file; every line names the engine and rank that wrote it."""

    def __init__(self, path: str, incarnation: str, rank: int) -> None:
        self._who = {"engine": incarnation, "rank": rank}
        # Lines are short and the file is opened for appending, so lines of several processes do not mix.
        self._stream: IO[str] | None = open(path, "a", buffering=1) if path else None  # noqa: SIM115

    def event(self, name: str, **fields: object) -> None:
        if self._stream is None:
            return
        record = {"t": time.monotonic(), "event": name, **self._who, **fields}
        try:
            self._stream.write(json.dumps(record) + "\n")
        except OSError as error:
            logger.warning("Tandem: the trace of transfers ends here: %s", error)
            self.close()

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            # What could not be written before cannot be now.
            with contextlib.suppress(OSError):
                stream.close()
