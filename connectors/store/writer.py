"""Store objects: reserve slots of staging for them, and write filled slots to the tiers.

``ObjectWriter.reserve`` takes a slot for an object, which the ranks fill. ``commit`` then queues
its writes to all tiers; ``drop`` frees the slot instead. ``promote`` copies an object that a fetch
has read from a slow tier to the faster ones.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from connectors.store.planning.prefix import ObjectRef
from connectors.store.tier_threads import StoreLimits, TierThreads
from connectors.store.tiers.lanes import CallState, LaneCall
from connectors.store.tiers.objects import ObjectHeader, ObjectName
from connectors.store.tiers.slot_calls import SlotCalls
from connectors.store.tiers.staging import Staging, slot_bytes


class ObjectWriter:
    """Writes of one engine's store.

    ``sizes``       payload bytes of an object, by index of each group that has objects
    ``tiers``       tiers, fastest first
    ``slot_calls``  calls that use slots of ``staging``; the writer adds its writes
    ``counts``      number of events since the start, by event
    ``seconds``     total duration of writes, by tier label, in seconds
    """

    def __init__(
        self,
        sizes: Mapping[int, int],
        tiers: Sequence[TierThreads],
        staging: Staging,
        slot_calls: SlotCalls,
        limits: StoreLimits,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._sizes = sizes
        self._tiers = tiers
        self._staging = staging
        self._slot_calls = slot_calls
        self._limits = limits
        self._reserved: set[int] = set()
        # Offset of the slot of each queued or running write.
        self._writing: list[int] = []
        # Objects stored since the last `take_stored`; None unless `record_stored` was called.
        self._stored: list[tuple[str, ObjectName]] | None = None

    def reserve(self, ref: ObjectRef) -> int | None:
        """Reserve a slot of staging for an object to store; return its offset.

        Return None, and count a dropped store, if staging has no room, if stores may not use more
        of it (``_may_store``), or if no tier accepts writes.
        """
        self._slot_calls.sweep()
        size, offset = self._sizes[ref.group], None
        accepted = any(
            not tier.writes.hangs and tier.writes.pending < self._limits.queue_objects for tier in self._tiers
        )
        if accepted and self._may_store(size):
            offset = self._staging.take(size)
        if offset is None:
            self.counts["dropped_stores"] += 1
        else:
            self._reserved.add(offset)
        return offset

    def commit(self, ref: ObjectRef, name: ObjectName, offset: int, cost_ns: int) -> None:
        """Queue writes of an object to all tiers, after all ranks have filled its slot.

        Its slot is freed after the writes. Counts a dropped store per tier that rejects it.

        ``cost_ns``  time to recompute the object, in nanoseconds; orders evictions
        """
        written = [self._write(tier, name, offset, self._sizes[ref.group], cost_ns) for tier in self._tiers]
        self.counts["dropped_stores"] += written.count(False)
        self._release(offset)

    def drop(self, offset: int) -> None:
        """Free a reserved slot without a write, and count a dropped store."""
        self.counts["dropped_stores"] += 1
        self._release(offset)

    def promote(self, name: ObjectName, offset: int, header: ObjectHeader, tier: int) -> None:
        """Queue writes of a verified object to all tiers faster than the one it was read from.

        Skips a tier if stores may not use more of staging (``_may_store``).

        ``tier``  number of the tier it was read from; 0 is the fastest
        """
        size = header.payload_bytes
        for faster in self._tiers[:tier]:
            if self._may_store(size):
                self._write(faster, name, offset, size, header.cost_ns)

    def record_stored(self) -> None:
        """Start to record stored objects for ``take_stored``."""
        self._stored = []

    def take_stored(self) -> list[tuple[str, ObjectName]]:
        """Return (tier label, object) of each object stored since the last call.

        Empty without ``record_stored``.
        """
        if self._stored is None:
            return []
        stored, self._stored = self._stored, []
        return stored

    def _release(self, offset: int) -> None:
        self._reserved.discard(offset)
        self._staging.give_back(offset)

    def _may_store(self, size: int) -> bool:
        """Return whether stores may use staging for one more object of ``size`` payload bytes.

        True if stores then use at most half of staging, or if there is no other store.
        """
        stores = self._reserved.union(self._writing)
        return not stores or 2 * (self._staging.bytes_of(stores) + slot_bytes(size)) <= self._staging.size_bytes

    def _write(self, tier: TierThreads, name: ObjectName, offset: int, size: int, cost_ns: int) -> bool:
        deadline, view = time.monotonic() + self._limits.store_s, self._staging.view(offset, size)
        call = tier.writes.submit(partial(tier.folder.write, name, view, cost_ns, deadline), deadline)
        if call is None:
            return False
        self._staging.share(offset)
        self._writing.append(offset)
        self._slot_calls.add(tier.writes, call, offset, partial(self._written, tier.folder.label, name, offset, call))
        return True

    def _written(self, label: str, name: ObjectName, offset: int, call: LaneCall[bool]) -> None:
        self._writing.remove(offset)
        self.seconds[label] += call.seconds
        if not call.started:
            self.counts["dropped_stores"] += 1
        # The result is False if the object was already in the tier.
        if self._stored is not None and call.state is CallState.ENDED and call.result:
            self._stored.append((label, name))
