"""Reads of a tier, with progress reports that distinguish a slow disk from a hanging one.

Each read reports progress after every read call (``files.py``). A running read progresses with its
own calls. A queued read progresses with the calls of any read of its tier.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field

from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.objects import ObjectHeader, ObjectName


@dataclass(slots=True)
class Progress:
    """Time of a read's last progress, in ``time.monotonic()`` seconds; 0 while it is queued."""

    at: float = 0.0


@dataclass(slots=True)
class TierReads:
    """Reads of one tier by several threads. ``progress`` has the latest progress of any read."""

    folder: FolderTier
    progress: Progress = field(default_factory=Progress)

    def read(self, name: ObjectName, payload: memoryview, progress: Progress) -> ObjectHeader:
        """Read and verify an object on the caller's thread, as ``FolderTier.read``.

        Updates ``progress`` and the tier's progress. Raises StoreError if the object is missing,
        unreadable or corrupt.
        """
        # Keep the tier's progress, which counted while this read was queued. 0 would mean queued.
        progress.at = max(self.progress.at, sys.float_info.min)

        def piece_read() -> None:
            progress.at = self.progress.at = time.monotonic()

        return self.folder.read(name, payload, piece_read)

    def progress_at(self, progress: Progress) -> float:
        """Return the time of a read's last progress: for a queued read, of any read of the tier.

        In ``time.monotonic()`` seconds; about 0 if there was none.
        """
        return progress.at or self.progress.at
