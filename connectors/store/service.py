"""Move KV between files and staging memory, on the scheduler side of one engine.

An *object* is what the store keeps of one KV cache group for one span of tokens
(``planning/spans.py``), in one file. A *tier* is a folder of objects, on disk or in host memory.
*Staging* is memory that the engine's scheduler and workers share; workers copy KV between staging
and blocks. A *slot* of staging holds one object.

    fetches  look up the objects that a request could load, and read them into slots
             (``fetches.py``)
    writer   takes slots for objects to store, and writes the objects to the tiers (``writer.py``)

Threads of the tiers access the files. No method waits for them. A tier that fails, hangs or is full
only causes misses and dropped stores. Not thread-safe: only the scheduler's thread calls methods of
``KVStore``, ``fetches`` and ``writer``.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from connectors.store.fetches import Fetches
from connectors.store.planning.prefix import ObjectRef
from connectors.store.planning.spans import StorePlan
from connectors.store.tier_threads import StoreLimits, TierThreads
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.objects import ObjectName
from connectors.store.tiers.slot_calls import SlotCalls
from connectors.store.tiers.staging import Staging
from connectors.store.writer import ObjectWriter

_KEPT_CHANGES = 10_000


class KVStore:
    """One engine's access to stored objects in one or more tiers.

    ``plan``     spans of the KV cache groups
    ``space``    namespace of the objects
    ``sizes``    payload bytes of an object, by index of each group that has objects
    ``tiers``    folders, fastest first
    ``staging``  memory between files and blocks
    """

    def __init__(
        self,
        plan: StorePlan,
        space: bytes,
        sizes: Mapping[int, int],
        tiers: Sequence[FolderTier],
        staging: Staging,
        limits: StoreLimits,
    ) -> None:
        self.plan = plan
        self.space = space
        self.staging = staging
        self.tiers = tuple(tiers)
        self._sizes = dict(sizes)
        self._tiers = [TierThreads(folder, limits) for folder in tiers]
        self._slot_calls = SlotCalls(staging)
        self.writer = ObjectWriter(self._sizes, self._tiers, staging, self._slot_calls, limits)
        self.fetches = Fetches(plan, self._sizes, self._tiers, staging, self._slot_calls, self.writer, limits)
        for tier in self._tiers:
            # Read the eviction order in the background: lookups and reads do not need it.
            tier.writes.submit(tier.folder.open, time.monotonic() + limits.store_s)

    def object_bytes(self, refs: Iterable[ObjectRef]) -> int:
        """Return the sum of the objects' payload bytes."""
        return sum(self._sizes[ref.group] for ref in refs)

    def record_changes(self) -> None:
        """Start to record stored and removed objects for ``take_changes``."""
        self.writer.record_stored()
        for tier in self.tiers:
            tier.removed = deque(maxlen=_KEPT_CHANGES)

    def take_changes(self) -> tuple[list[tuple[str, ObjectName]], list[tuple[str, ObjectName]]]:
        """Return the objects that this process has stored, and removed, since the last call.

        Each entry is (tier label, object). A removed object was evicted or corrupt; at most the
        last _KEPT_CHANGES removals of each tier are returned. Both lists are empty without
        ``record_changes``.
        """
        self._slot_calls.sweep()
        stored, removed = self.writer.take_stored(), []
        for tier in self.tiers:
            while tier.removed:
                removed.append((tier.label, tier.removed.popleft()))
        return stored, removed

    @property
    def counts(self) -> Counter[str]:
        """Number of events of fetches and stores since the start, by event."""
        return self.fetches.counts + self.writer.counts

    def totals(self) -> dict[str, dict[str, float]]:
        """Return counts, bytes and seconds since the start: ``{counter: {label: number}}``."""
        self._slot_calls.sweep()
        counts, tiers = self.counts, {tier.label: tier.counts for tier in self.tiers}
        return {
            "store_requests": {
                "hit": counts["hits"],
                "miss": counts["misses"] - counts["declined"],
                "declined": counts["declined"],
            },
            "store_tokens": {"hit": counts["hit_tokens"], "miss": counts["missed_tokens"]},
            "store_problems": {
                "late_lookup": counts["late_lookups"],
                "late_load": counts["late"],
                "failed_load": counts["failed_reads"],
                "no_staging_for_load": counts["no_room_to_load"],
                "dropped_store": counts["dropped_stores"],
                "failed_store": sum(each.failed_stores for each in tiers.values()),
            },
            "store_corrupt": {label: each.corrupt for label, each in tiers.items()},
            "store_evicted": {label: each.evicted for label, each in tiers.items()},
            "store_loaded_bytes": {label: each.loaded_bytes for label, each in tiers.items()},
            "store_loaded_seconds": {label: self.fetches.seconds[label] for label in tiers},
            "store_stored_bytes": {label: each.stored_bytes for label, each in tiers.items()},
            "store_stored_seconds": {label: self.writer.seconds[label] for label in tiers},
        }

    def idle(self) -> bool:
        """Return whether no write, and no read of an ended fetch, is queued or running."""
        self._slot_calls.sweep()
        return not self._slot_calls.pending

    def close(self) -> None:
        """Fail queued calls, reject new ones, and remove the staging file.

        Objects that are not written yet are lost.
        """
        for tier in self._tiers:
            tier.close()
        self.staging.close()
