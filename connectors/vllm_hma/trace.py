"""One JSON line per transfer event, for benchmarks and debugging; off unless ``trace_path`` is set.

Times are ``time.monotonic()``, which all processes of one host share.
"""

from __future__ import annotations

import json
import time
from typing import IO


class Trace:
    """Appends to a file; every line names the engine and rank that wrote it."""

    def __init__(self, path: str, incarnation: str, rank: int) -> None:
        self._who = {"engine": incarnation, "rank": rank}
        # Lines are short and the file is opened for appending, so lines of several processes do not mix.
        self._stream: IO[str] | None = open(path, "a", buffering=1) if path else None  # noqa: SIM115

    def event(self, name: str, **fields: object) -> None:
        if self._stream is not None:
            record = {"t": time.monotonic(), "event": name, **self._who, **fields}
            self._stream.write(json.dumps(record) + "\n")

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
