"""Move KV between files and staging memory, on the scheduler side of one engine.

An *object* is what the store keeps of one KV cache group for one chunk of tokens
(``planning/chunks.py``), in one file. A *tier* is a folder of objects, on disk or in host memory.
*Staging* is memory that the engine's scheduler and workers share. A *slot* of it holds one object.

Threads of the tiers access the files; no method waits for them. A tier that fails, hangs or is full
only causes misses and dropped stores. Only the scheduler's thread calls ``KVStore`` and ``Fetch``.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from connectors.store.keys.names import ObjectName
from connectors.store.load_costs import LoadCosts
from connectors.store.planning.chunks import StorePlan
from connectors.store.planning.prefix import ObjectRef
from connectors.store.settings import StoreSettings
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.lanes import Call, Lane
from connectors.store.tiers.staging import Staging, slot_bytes

_QUEUED_LOOKUPS, _QUEUED_READS, _QUEUED_WRITES = 256, 1024, 256
_READ_THREADS, _WRITE_THREADS = 4, 2


class TierLanes:
    def __init__(self, folder: FolderTier) -> None:
        self.folder, self.label = folder, folder.label
        self.lookups = Lane(f"store-find-{folder.label}", 1, _QUEUED_LOOKUPS)
        self.reads = Lane(f"store-read-{folder.label}", _READ_THREADS, _QUEUED_READS)
        self.writes = Lane(f"store-write-{folder.label}", _WRITE_THREADS, _QUEUED_WRITES)
        self.lanes = self.lookups, self.reads, self.writes


class KVStore:
    """One engine's access to stored objects in one or more tiers.

    ``space``    namespace of the objects
    ``sizes``    payload bytes of an object, by index of each group that has objects
    ``tiers``    folders, fastest first
    ``counts``   as ``COUNTERS`` in ``connectors/vllm_hma/metrics.py``, by counter and label
    ``running``  fetches in progress
    """

    def __init__(
        self,
        plan: StorePlan,
        space: bytes,
        sizes: Mapping[int, int],
        tiers: Sequence[FolderTier],
        staging: Staging,
        settings: StoreSettings,
    ) -> None:
        self.plan = plan
        self.space = space
        self.sizes = dict(sizes)
        self.tiers = [TierLanes(folder) for folder in tiers]
        self.staging = staging
        self.settings = settings
        self.costs = LoadCosts()
        self.counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.running: set[object] = set()
        # Number of stores that use a slot, by offset.
        self._stores: Counter[int] = Counter()
        for tier in self.tiers:
            # Read the eviction order in the background: lookups and reads do not need it.
            tier.writes.submit(partial(_open, tier.folder), time.monotonic() + settings.store_s)

    def object_bytes(self, refs: Iterable[ObjectRef]) -> int:
        return sum(self.sizes[ref.group] for ref in refs)

    def reserve(self, ref: ObjectRef) -> int | None:
        """Reserve a slot for an object to store; None without room, or a tier that accepts it."""
        self.sweep()
        offset = None
        if any(tier.writes.accepts for tier in self.tiers) and self._may_store(self.sizes[ref.group]):
            offset = self.staging.take(self.sizes[ref.group])
        if offset is None:
            self.count_problem("dropped_store")
        else:
            self._stores[offset] += 1
        return offset

    def commit(self, ref: ObjectRef, name: ObjectName, offset: int) -> None:
        """Write an object that all ranks have filled to all tiers; then free its slot."""
        for tier in self.tiers:
            if not self._write(tier, name, offset, self.sizes[ref.group]):
                self.count_problem("dropped_store")
        self._release(offset)

    def drop(self, offset: int) -> None:
        self.count_problem("dropped_store")
        self._release(offset)

    def promote(self, name: ObjectName, offset: int, size: int, tier: int) -> None:
        for faster in self.tiers[:tier]:
            if self._may_store(size):
                self._write(faster, name, offset, size)

    def _may_store(self, size: int) -> bool:
        """True if stores then use at most half of staging, or if there is no other store."""
        used = self.staging.bytes_of(self._stores)
        return not used or 2 * (used + slot_bytes(size)) <= self.staging.size_bytes

    def _write(self, tier: TierLanes, name: ObjectName, offset: int, size: int) -> bool:
        deadline, view = time.monotonic() + self.settings.store_s, self.staging.view(offset, size)
        call = tier.writes.submit(
            lambda call: tier.folder.write(name, view, deadline),
            deadline,
            partial(self._written, tier.label, offset, size),
        )
        if call is None:
            return False
        self.staging.share(offset)
        self._stores[offset] += 1
        return True

    def _written(self, label: str, offset: int, size: int, call: Call) -> None:
        self._release(offset)
        self.counts["store_stored_seconds", label] += call.seconds
        if not call.ok:
            self.count_problem("failed_store" if call.started else "dropped_store")
        elif call.result:  # no other writer was faster
            self.counts["store_stored_bytes", label] += size

    def count_problem(self, kind: str) -> None:
        self.counts["store_problems", kind] += 1

    def _release(self, offset: int) -> None:
        self._stores[offset] -= 1
        if not self._stores[offset]:
            del self._stores[offset]
        self.staging.give_back(offset)

    def sweep(self) -> None:
        for tier in self.tiers:
            for lane in tier.lanes:
                lane.sweep()

    def idle(self) -> bool:
        self.sweep()
        return all(lane.idle for tier in self.tiers for lane in tier.lanes)

    def totals(self) -> dict[tuple[str, str], float]:
        """``counts``, and those that the threads of the tiers keep."""
        self.sweep()
        for tier in self.tiers:
            self.counts["store_corrupt", tier.label] = tier.folder.corrupt
            self.counts["store_evicted", tier.label] = tier.folder.evicted
        return dict(self.counts)

    def close(self) -> None:
        """Fail queued calls and reject new ones: objects that are not written yet are lost."""
        for tier in self.tiers:
            for lane in tier.lanes:
                lane.close()
        self.staging.close()


def _open(folder: FolderTier, call: Call) -> None:
    folder.open()
