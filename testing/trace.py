"""Read the trace files that engines write with ``trace_path``."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any


def read_trace(path: Path, from_byte: int = 0) -> list[dict[str, Any]]:
    """Return the events after the first ``from_byte`` bytes of a trace file, in file order.

    Lines that are not complete JSON are skipped, for example one that is being written. Raises
    OSError if the file cannot be read.
    """
    with path.open("rb") as stream:
        stream.seek(from_byte)
        lines = stream.read().split(b"\n")[:-1]
    events = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):
            events.append(json.loads(line))
    return events
