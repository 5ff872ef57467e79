"""Threads of one tier, and the deadlines and bounds of the calls that run on them."""

from __future__ import annotations

from dataclasses import dataclass

from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.lanes import Lane
from connectors.store.tiers.reads import TierReads

_QUEUED_LOOKUPS = 256
_QUEUED_READS = 1024


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Deadlines and bounds of the store.

    ``lookup_s``       time after which an unanswered lookup is a miss, and after which a fetch ends
                       if none of its reads progresses (``tiers/reads.py``), in seconds
    ``load_s``         time from the start of a fetch after which unverified objects are not loaded,
                       in seconds
    ``store_s``        time for which a write of an object to a tier may wait for a thread, a lock
                       or evictions, in seconds; then the store drops the write
    ``queue_objects``  maximum number of objects queued for writing, per tier; a tier with a full
                       queue gets no further objects
    ``read_threads``   threads per tier that read objects
    ``write_threads``  threads per tier that write objects
    """

    lookup_s: float = 0.015
    load_s: float = 2.0
    store_s: float = 30.0
    queue_objects: int = 256
    read_threads: int = 4
    write_threads: int = 2


class TierThreads:
    """A tier, its reads, and the threads of its lookups, reads and writes."""

    def __init__(self, folder: FolderTier, limits: StoreLimits) -> None:
        self.folder = folder
        self.verified = TierReads(folder)
        self.lookups = Lane(f"store-find-{folder.label}", 1, _QUEUED_LOOKUPS)
        self.reads = Lane(f"store-read-{folder.label}", limits.read_threads, _QUEUED_READS)
        self.writes = Lane(f"store-write-{folder.label}", limits.write_threads, limits.queue_objects)

    def close(self) -> None:
        """Fail queued calls, reject new ones, and close the folder (``FolderTier.close``)."""
        for lane in (self.lookups, self.reads, self.writes):
            lane.close()
        self.folder.close()
