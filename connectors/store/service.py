"""Moves KV between files and staging memory, on the scheduler side of one engine.

An *object* is what the store keeps of one KV cache group for one span of tokens
(``planning/spans.py``), in one file. A *tier* is a folder of objects, on disk or in host memory.
*Staging* is memory that the engine's scheduler and workers share; workers copy KV between staging
and blocks. A *slot* of staging holds one object.

    fetch  ``begin_fetch`` starts to look up the objects that a request could load. Repeated calls
           of ``poll`` start the reads of found objects into slots, and return the result once the
           fetch has ended; ``stop_fetch`` ends it early. ``hand_over`` passes the slots to the
           caller; ``end_fetch`` frees them
    store  ``reserve`` takes a slot for an object, which the ranks fill. ``commit`` then queues its
           writes to all tiers; ``drop`` frees the slot instead

Threads of the tiers access the files. No method waits for them, except that ``close`` may wait for
a second per tier. A tier that fails, hangs or is full only causes misses and dropped stores. Not
thread-safe: only the scheduler's thread calls these methods.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from connectors.store.planning.fetch import Fetch
from connectors.store.planning.prefix import ObjectRef
from connectors.store.planning.spans import StorePlan
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.lanes import CallState, Lane, LaneCall
from connectors.store.tiers.objects import ObjectHeader, ObjectName
from connectors.store.tiers.reads import Progress, TierReads
from connectors.store.tiers.staging import Staging, slot_bytes

logger = logging.getLogger(__name__)

_LOOKUPS_PER_CALL = 64
_QUEUED_LOOKUPS = 256
_QUEUED_READS = 1024
_KEPT_CHANGES = 10_000


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

    lookup_s: float = 0.02
    load_s: float = 2.0
    store_s: float = 30.0
    queue_objects: int = 256
    read_threads: int = 4
    write_threads: int = 2


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch: the request can resume at ``end_token`` (``planning/prefix.py``).

    ``start_token``  number of tokens in the engine's own cache when the fetch began
    ``end_token``    number of tokens with KV after the load; ``start_token`` without a load
    ``offsets``      offset in staging of each verified object that the load needs
    ``present``      objects that a tier has, as far as lookups were answered in time; without those
                     that no tier could read
    ``tier``         label of the slowest tier from which an object was verified; without a verified
                     object, label of the fastest tier
    ``read_bytes``   payload bytes of the objects in ``offsets``
    ``seconds``      duration of the fetch
    ``ended_at``     end of the fetch, in ``time.monotonic()`` seconds
    """

    start_token: int
    end_token: int
    offsets: Mapping[ObjectRef, int]
    present: frozenset[ObjectRef]
    tier: str = ""
    read_bytes: int = 0
    seconds: float = 0.0
    ended_at: float = 0.0


@dataclass(slots=True)
class _Reading:
    """Read of one object from tier number ``tier`` into the slot at ``offset``."""

    ref: ObjectRef
    offset: int
    tier: int
    call: LaneCall[ObjectHeader]
    progress: Progress


@dataclass(slots=True)
class _Fetch:
    """State of one request's fetch.

    Times of events are in ``time.monotonic()`` seconds. Tiers are numbered from the fastest one.

    ``lookups``     (tier number, objects, call) of each unanswered lookup
    ``unanswered``  numbers of the tiers whose lookup has no answer, by object
    ``tiers``       numbers of the tiers that have the object and did not fail to read it, by object
    ``readings``    queued and running reads
    ``offsets``     offsets in staging of the verified objects that the request needs
    ``read_at``     time from which the fetch waits for bytes of a tier. The start of the fetch, a
                    verified object, and a failed read that starts again on another tier set it to
                    the time of the event. A start of reads while none is queued or running sets
                    it to the time of the event minus ``looked_s``
    ``looked_s``    duration of the slowest lookup that has ended, at most ``lookup_s``, in seconds
    ``slowest``     number of the slowest tier from which an object was verified
    ``ended_at``    end of the fetch
    """

    machine: Fetch
    names: dict[ObjectRef, ObjectName]
    began_at: float
    read_at: float
    lookups: list[tuple[int, list[ObjectRef], LaneCall[list[bool]]]] = field(default_factory=list)
    unanswered: dict[ObjectRef, set[int]] = field(default_factory=dict)
    tiers: dict[ObjectRef, list[int]] = field(default_factory=dict)
    readings: list[_Reading] = field(default_factory=list)
    offsets: dict[ObjectRef, int] = field(default_factory=dict)
    looked_s: float = 0.0
    slowest: int = 0
    over: bool = False
    ended_at: float = 0.0


@dataclass(slots=True)
class _Lingering:
    """Use of the slot at ``offset`` by a write, or by a read whose result is not needed any more.

    ``written``  tier label and object of a write; None for a read
    """

    lane: Lane
    call: LaneCall[ObjectHeader] | LaneCall[bool]
    offset: int
    written: tuple[str, ObjectName] | None = None


@dataclass(slots=True)
class _Tier:
    """A tier, its reads, and the threads of its lookups, reads and writes."""

    folder: FolderTier
    verified: TierReads
    lookups: Lane
    reads: Lane
    writes: Lane


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
        self.counts: Counter[str] = Counter()
        self._sizes = dict(sizes)
        self._slots = {group: slot_bytes(size) for group, size in sizes.items()}
        self._limits = limits
        self.tiers = tuple(tiers)
        self._tiers = [
            _Tier(
                folder,
                TierReads(folder),
                Lane(f"store-find-{folder.label}", 1, _QUEUED_LOOKUPS),
                Lane(f"store-read-{folder.label}", limits.read_threads, _QUEUED_READS),
                Lane(f"store-write-{folder.label}", limits.write_threads, limits.queue_objects),
            )
            for folder in tiers
        ]
        self._fetches: dict[str, _Fetch] = {}
        self._seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._reserved: set[int] = set()
        self._lingering: list[_Lingering] = []
        # Objects stored since the last `take_changes`; None unless `record_changes` was called.
        self._stored: list[tuple[str, ObjectName]] | None = None
        for tier in self._tiers:
            # Read the eviction order in the background: lookups and reads do not need it.
            tier.writes.submit(tier.folder.open, time.monotonic() + limits.store_s)

    # Fetches.

    def begin_fetch(
        self,
        request_id: str,
        names: Mapping[ObjectRef, ObjectName],
        start_token: int,
        limit_token: int,
        full_attention_only: bool = False,
    ) -> None:
        """Start to look up the objects that a request could load beyond ``start_token``.

        Ends an earlier fetch of this request.

        ``names``                names of the request's ``possible_objects``; an object without a
                                 name counts as missing
        ``limit_token``          largest token at which the request may resume
                                 (``planning/prefix.py``)
        ``full_attention_only``  whether a transfer supplies windows and states
        """
        self.end_fetch(request_id)
        now = time.monotonic()
        machine = Fetch(self.plan.full_attention if full_attention_only else self.plan, start_token, limit_token)
        fetch = _Fetch(machine, dict(names), now, now)
        self._fetches[request_id] = fetch
        self.counts["queries"] += 1
        candidates = [ref for ref in machine.candidates if ref in names]
        fetch.unanswered = {ref: set() for ref in candidates}
        for number, tier in enumerate(self._tiers):
            for first in range(0, len(candidates), _LOOKUPS_PER_CALL):
                refs = candidates[first : first + _LOOKUPS_PER_CALL]
                asked = [fetch.names[ref] for ref in refs]
                call = tier.lookups.submit(partial(tier.folder.find_all, asked), now + self._limits.lookup_s)
                if call is not None:
                    fetch.lookups.append((number, refs, call))
                    for ref in refs:
                        fetch.unanswered[ref].add(number)
        machine.found((), [ref for ref in machine.candidates if not fetch.unanswered.get(ref)])

    def has_fetch(self, request_id: str) -> bool:
        """Return whether the request has a fetch, in progress or with a result."""
        return request_id in self._fetches

    def poll(self, request_id: str) -> Fetched | None:
        """Continue a fetch and return its result, or None while it runs.

        From ``load_s`` after the start of the fetch, every call returns a result.
        """
        fetch = self._fetches[request_id]
        if not fetch.over:
            self._advance(fetch, time.monotonic())
        self._sweep()
        if not fetch.over:
            return None
        machine = fetch.machine
        offsets = {ref: fetch.offsets[ref] for ref in machine.needed}
        present = frozenset(ref for ref, tiers in fetch.tiers.items() if tiers)
        tier = self._tiers[fetch.slowest].folder.label
        read_bytes, seconds = self.object_bytes(offsets), fetch.ended_at - fetch.began_at
        return Fetched(
            machine.start_token, machine.end_token, offsets, present, tier, read_bytes, seconds, fetch.ended_at
        )

    def stop_fetch(self, request_id: str) -> None:
        """End a fetch now. ``poll`` then returns the longest prefix of verified objects."""
        fetch = self._fetches[request_id]
        self._advance(fetch, time.monotonic())
        if not fetch.over:
            self.counts["late"] += 1
            fetch.machine.give_up()
            self._settle(fetch)

    def idle_s(self, request_id: str) -> float:
        """Return the time for which a fetch has waited for bytes of the tiers, in seconds.

        Before the first bytes this is the time that its lookups and reads have taken. Bytes of any
        read of a tier count for the queued reads of this tier. A read that starts again on another
        tier sets the time back to 0.
        """
        return self._idle_s(self._fetches[request_id], time.monotonic())

    def object_bytes(self, refs: Iterable[ObjectRef]) -> int:
        """Return the sum of the objects' payload bytes."""
        return sum(self._sizes[ref.group] for ref in refs)

    def hand_over(self, request_id: str) -> list[int]:
        """Forget a fetch that has a result, and return the offsets of its slots.

        The caller frees the slots (``Staging.give_back``) when all ranks have ended the load.
        """
        fetch = self._fetches.pop(request_id)
        return list(fetch.offsets.values())

    def end_fetch(self, request_id: str) -> None:
        """Forget a fetch, if there is one, and free its slots.

        The slot of a running read is freed once the read has ended.
        """
        fetch = self._fetches.pop(request_id, None)
        if fetch is None:
            return
        for offset in fetch.offsets.values():
            self.staging.give_back(offset)
        self._abandon(fetch.readings)
        self._sweep()

    def _advance(self, fetch: _Fetch, now: float) -> None:
        self._take_lookups(fetch, now)
        self._take_reads(fetch)
        hangs = bool(fetch.readings) and self._idle_s(fetch, now) >= self._limits.lookup_s
        if not fetch.machine.settled and (hangs or now >= fetch.began_at + self._limits.load_s):
            self.counts["late"] += 1
            fetch.machine.give_up()
        # A read that cannot start may change the needed objects.
        while reads := self._next_reads(fetch):
            if not fetch.readings:
                # The time between two polls is the engine's step, not idle time of the tiers.
                fetch.read_at = now - fetch.looked_s
            for ref in reads:
                self._read(fetch, ref, now)
        if fetch.machine.settled:
            self._settle(fetch)

    def _next_reads(self, fetch: _Fetch) -> list[ObjectRef]:
        """Return the objects to read now, of the longest prefix that fits into staging.

        First frees unneeded slots, then lowers ``end_token`` if there is too little room.
        """
        self._free_unneeded(fetch)
        if fetch.machine.fit(self._slots, self.staging.size_bytes - self.staging.used_bytes):
            self.counts["no_room_to_load"] += 1
        return fetch.machine.next_reads()

    def _free_unneeded(self, fetch: _Fetch) -> None:
        """Free the slots of objects past ``end_token``, which only decreases once reads start."""
        for ref in fetch.offsets.keys() - set(fetch.machine.needed):
            self.staging.give_back(fetch.offsets.pop(ref))

    def _idle_s(self, fetch: _Fetch, now: float) -> float:
        heard = (self._tiers[each.tier].verified.progress_at(each.progress) for each in fetch.readings)
        return now - max(fetch.read_at, *heard, 0.0)

    def _take_lookups(self, fetch: _Fetch, now: float) -> None:
        waiting = []
        for number, refs, call in fetch.lookups:
            if not call.over:
                waiting.append((number, refs, call))
                continue
            fetch.looked_s = max(fetch.looked_s, min(call.seconds, self._limits.lookup_s))
            answers = call.result if call.state is CallState.ENDED and call.result is not None else [False] * len(refs)
            for ref, found in zip(refs, answers, strict=True):
                fetch.unanswered[ref].discard(number)
                if found:
                    fetch.tiers.setdefault(ref, []).append(number)
            self._decide(fetch, refs)
        fetch.lookups = waiting
        if waiting and now >= fetch.began_at + self._limits.lookup_s:
            self.counts["late_lookups"] += len(waiting)
            fetch.lookups = []
            for _, refs, _ in waiting:
                for ref in refs:
                    fetch.unanswered[ref].clear()
                self._decide(fetch, refs)
            fetch.machine.stop_looking()

    def _decide(self, fetch: _Fetch, refs: Sequence[ObjectRef]) -> None:
        """Record which of ``refs`` have a known fastest tier, and which are in no tier."""
        decided = [
            ref
            for ref in refs
            if not fetch.unanswered[ref] or min(fetch.tiers.get(ref, ()), default=inf) < min(fetch.unanswered[ref])
        ]
        fetch.machine.found(
            [ref for ref in decided if ref in fetch.tiers], [ref for ref in decided if ref not in fetch.tiers]
        )

    def _take_reads(self, fetch: _Fetch) -> None:
        reading = []
        for each in fetch.readings:
            if not each.call.over:
                reading.append(each)
                continue
            self._seconds["loaded", self._tiers[each.tier].folder.label] += each.call.seconds
            if each.call.state is CallState.ENDED and fetch.machine.read(each.ref):
                fetch.offsets[each.ref] = each.offset
                fetch.read_at = time.monotonic()
                fetch.slowest = max(fetch.slowest, each.tier)
                self._promote(fetch.names[each.ref], each)
            else:
                self.staging.give_back(each.offset)
                if each.call.state is CallState.FAILED:
                    self.counts["failed_reads"] += 1
                    fetch.tiers[each.ref] = [tier for tier in fetch.tiers[each.ref] if tier != each.tier]
                    retried = self._start_read(fetch, each.ref, time.monotonic())
                    if retried is None:
                        fetch.machine.failed(each.ref)
                    else:
                        fetch.read_at = time.monotonic()
                        reading.append(retried)
        fetch.readings = reading

    def _read(self, fetch: _Fetch, ref: ObjectRef, now: float) -> None:
        started = self._start_read(fetch, ref, now)
        if started is None:
            fetch.machine.failed(ref)
        else:
            fetch.readings.append(started)

    def _start_read(self, fetch: _Fetch, ref: ObjectRef, now: float) -> _Reading | None:
        """Start to read an object from the fastest tier that has it and accepts the read.

        Return None if there is no such tier, or no room in staging.
        """
        if not fetch.tiers.get(ref):
            return None
        size = self._sizes[ref.group]
        offset = self.staging.take(size)
        if offset is None:
            self.counts["no_room_to_load"] += 1
            return None
        for number in sorted(fetch.tiers[ref]):
            tier, name, view = self._tiers[number], fetch.names[ref], self.staging.view(offset, size)
            deadline = max(now, fetch.began_at + self._limits.load_s)
            progress = Progress()
            call = tier.reads.submit(partial(tier.verified.read, name, view, progress), deadline)
            if call is not None:
                return _Reading(ref, offset, number, call, progress)
        self.staging.give_back(offset)
        return None

    def _promote(self, name: ObjectName, reading: _Reading) -> None:
        """Queue writes of a verified object to all tiers faster than the one it was read from.

        Skips a tier if stores may not use more of staging (``_may_store``).
        """
        assert reading.call.result is not None
        cost_ns = reading.call.result.cost_ns
        size = reading.call.result.payload_bytes
        for tier in self._tiers[: reading.tier]:
            if self._may_store(size):
                self._write(tier, name, reading.offset, size, cost_ns)

    def _settle(self, fetch: _Fetch) -> None:
        fetch.over, fetch.ended_at = True, time.monotonic()
        machine = fetch.machine
        self._free_unneeded(fetch)
        self._abandon(fetch.readings)
        fetch.readings = []
        loaded = machine.end_token - machine.start_token
        self.counts["hits" if loaded else "misses"] += 1
        self.counts["hit_tokens"] += loaded
        self.counts["missed_tokens"] += machine.limit_token - machine.end_token

    def _abandon(self, readings: Iterable[_Reading]) -> None:
        """Cancel queued reads. ``_sweep`` frees the slot of each read once the read has ended."""
        for each in readings:
            lane = self._tiers[each.tier].reads
            lane.cancel(each.call)
            self._lingering.append(_Lingering(lane, each.call, each.offset))

    # Stores.

    def reserve(self, ref: ObjectRef) -> int | None:
        """Reserve a slot of staging for an object to store; return its offset.

        Return None, and count a dropped store, if staging has no room, if stores may not use more
        of it (``_may_store``), or if no tier accepts writes.
        """
        self._sweep()
        size, offset = self._sizes[ref.group], None
        accepted = any(
            not tier.writes.hangs and tier.writes.pending < self._limits.queue_objects for tier in self._tiers
        )
        if accepted and self._may_store(size):
            offset = self.staging.take(size)
        if offset is None:
            self.counts["dropped_stores"] += 1
        else:
            self._reserved.add(offset)
        return offset

    def commit(self, ref: ObjectRef, name: ObjectName, offset: int, cost_ns: int) -> None:
        """Queue writes of an object to all tiers, after all ranks have filled its slot.

        Its slot is freed after the writes. Counts a dropped store per tier that does not accept it.

        ``cost_ns``  time to recompute the object, in nanoseconds; orders evictions
        """
        written = [self._write(tier, name, offset, self._sizes[ref.group], cost_ns) for tier in self._tiers]
        self.counts["dropped_stores"] += written.count(False)
        self._release(offset)

    def drop(self, offset: int) -> None:
        """Free a reserved slot without a write, and count a dropped store."""
        self.counts["dropped_stores"] += 1
        self._release(offset)

    def _release(self, offset: int) -> None:
        self._reserved.discard(offset)
        self.staging.give_back(offset)

    def _may_store(self, size: int) -> bool:
        """Return whether stores may use staging for one more object of ``size`` payload bytes.

        True if stores then use at most half of staging, or if there is no other store.
        """
        stores = self._reserved | {each.offset for each in self._lingering if each.written is not None}
        return not stores or 2 * (self.staging.bytes_of(stores) + slot_bytes(size)) <= self.staging.size_bytes

    def _write(self, tier: _Tier, name: ObjectName, offset: int, size: int, cost_ns: int) -> bool:
        deadline, view = time.monotonic() + self._limits.store_s, self.staging.view(offset, size)
        call = tier.writes.submit(partial(tier.folder.write, name, view, cost_ns, deadline), deadline)
        if call is None:
            return False
        self.staging.share(offset)
        self._lingering.append(_Lingering(tier.writes, call, offset, (tier.folder.label, name)))
        return True

    # Changes, counts and shutdown.

    def record_changes(self) -> None:
        """Start to record stored and removed objects for ``take_changes``."""
        self._stored = []
        for tier in self.tiers:
            tier.removed = deque(maxlen=_KEPT_CHANGES)

    def take_changes(self) -> tuple[list[tuple[str, ObjectName]], list[tuple[str, ObjectName]]]:
        """Return what this process has stored and what it has removed since the last call.

        Each entry is (tier label, object). A removed object was evicted or corrupt; at most the
        last _KEPT_CHANGES removals of each tier are returned. Both lists are empty without
        ``record_changes``.
        """
        self._sweep()
        stored, removed = self._stored or [], []
        if self._stored is not None:
            self._stored = []
        for tier in self.tiers:
            while tier.removed:
                removed.append((tier.label, tier.removed.popleft()))
        return stored, removed

    @property
    def pending_loads(self) -> int:
        """Number of fetches that have not ended."""
        return sum(not fetch.over for fetch in self._fetches.values())

    def totals(self) -> dict[str, dict[str, float]]:
        """Return counts, bytes and seconds since the start: ``{counter: {label: number}}``."""
        self._sweep()
        counts, tiers = self.counts, {tier.label: tier.counts for tier in self.tiers}
        return {
            "store_requests": {"hit": counts["hits"], "miss": counts["misses"]},
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
            "store_loaded_seconds": {label: self._seconds["loaded", label] for label in tiers},
            "store_stored_bytes": {label: each.stored_bytes for label, each in tiers.items()},
            "store_stored_seconds": {label: self._seconds["stored", label] for label in tiers},
        }

    def idle(self) -> bool:
        """Return whether no write, and no read of an ended fetch, is queued or running."""
        self._sweep()
        return not self._lingering

    def close(self) -> None:
        """Fail queued calls and reject new ones. Objects that are not written yet are lost.

        Waits at most a second per tier for threads that hold its ledger's lock.
        """
        for tier in self._tiers:
            for lane in (tier.lookups, tier.reads, tier.writes):
                lane.close()
            tier.folder.close()
        self.staging.close()

    def _sweep(self) -> None:
        kept, now = [], time.monotonic()
        for each in self._lingering:
            if each.call.deadline <= now:
                # If all threads of a lane hang, no thread takes a queued call and fails it.
                each.lane.cancel(each.call)
            if not each.call.over:
                kept.append(each)
                continue
            self.staging.give_back(each.offset)
            if each.written is not None:
                self._seconds["stored", each.written[0]] += each.call.seconds
                if not each.call.started:
                    self.counts["dropped_stores"] += 1
                # The result is False if the object was already in the tier.
                if self._stored is not None and each.call.state is CallState.ENDED and each.call.result:
                    self._stored.append(each.written)
        self._lingering = kept
