"""Reads of a tier and their progress, which distinguish a slow disk from one that hangs.

Each read reports its pieces. A read that runs makes progress with its own pieces; a queued one with
those of all reads of its tier.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.objects import ObjectHeader, ObjectName


@dataclass(slots=True)
class Progress:
    """Time of the last piece that was read, in seconds; 0 before the start of the read."""

    at: float = 0.0


@dataclass(slots=True)
class TierReads:
    """Reads of one tier by several threads. ``progress``: time of the last piece of any read."""

    folder: FolderTier
    progress: Progress = field(default_factory=Progress)

    def read(self, name: ObjectName, payload: memoryview, progress: Progress) -> ObjectHeader:
        """Read and verify an object on the caller's thread. Raises StoreError."""
        # While this read was queued, the progress of those before it counted.
        progress.at = max(self.progress.at, sys.float_info.min)

        def piece_read() -> None:
            progress.at = self.progress.at = time.monotonic()

        return self.folder.read(name, payload, piece_read)

    def progress_at(self, progress: Progress) -> float:
        """Return the time of a read's last progress, in seconds; 0 if there was none."""
        return progress.at or self.progress.at
