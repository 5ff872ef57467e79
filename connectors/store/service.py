"""The store of one engine: fetches and stores objects over its tiers.

    fetch  ``begin_fetch`` looks a request's objects up and reads them into staging; ``poll``
           returns the result; ``hand_over`` passes the slots to the caller, ``end_fetch`` frees
           them
    store  ``reserve`` takes a slot of staging for an object; ``commit`` writes it to the tiers once
           all ranks have filled it, ``drop`` discards it

No method blocks. A tier that fails, hangs or is full only causes misses and dropped stores. Only
the scheduler's thread calls these methods.
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
from connectors.store.tiers.staging import Staging

logger = logging.getLogger(__name__)

_LOOKUPS_PER_CALL = 64
_QUEUED_LOOKUPS = 256
_QUEUED_READS = 1024
_KEPT_CHANGES = 10_000


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Deadlines and bounds of the store.

    ``lookup_s``       time after which a lookup without an answer is a miss, and a read that
                       delivers nothing has failed, in seconds
    ``load_s``         time from the start of a fetch until its objects must be verified, in seconds
    ``store_s``        time after which an unwritten object is dropped, in seconds
    ``queue_objects``  maximum number of objects queued for writing, per tier; further ones are
                       dropped
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
    """Result of a fetch: the request can resume at ``end_token``.

    ``start_token``  tokens in the engine's own cache
    ``end_token``    tokens with KV after the load
    ``offsets``      slot in staging of each loaded object
    ``present``      all looked-up objects that a tier has
    ``absent``       all looked-up objects that no tier has; not those without an answer
    ``tier``         slowest tier that was read
    ``read_bytes``   bytes of the loaded objects
    ``seconds``      duration of the fetch
    ``ended_at``     end of the fetch, in ``time.monotonic()`` seconds
    """

    start_token: int
    end_token: int
    offsets: Mapping[ObjectRef, int]
    present: frozenset[ObjectRef]
    absent: frozenset[ObjectRef] = frozenset()
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

    ``lookups``     (tier, objects, call) of each unanswered lookup
    ``unanswered``  numbers of the tiers whose lookup has no answer, by object
    ``tiers``       numbers of the tiers that have the object, by object
    ``misses``      number of tiers that have answered that they have not the object, by object
    ``readings``    reads in progress
    ``offsets``     slots of the verified objects
    ``read_at``     time of the last verified object, in seconds. Before the first one: the start
                    of the reads, less the time that the lookups took
    ``looked_s``    time that the slowest lookup took, in seconds
    ``ended_at``    end of the fetch, in seconds
    """

    machine: Fetch
    names: dict[ObjectRef, ObjectName]
    began_at: float
    read_at: float
    lookups: list[tuple[int, list[ObjectRef], LaneCall[list[bool]]]] = field(default_factory=list)
    unanswered: dict[ObjectRef, set[int]] = field(default_factory=dict)
    tiers: dict[ObjectRef, list[int]] = field(default_factory=dict)
    misses: Counter[ObjectRef] = field(default_factory=Counter)
    readings: list[_Reading] = field(default_factory=list)
    offsets: dict[ObjectRef, int] = field(default_factory=dict)
    looked_s: float = 0.0
    slowest: int = 0
    over: bool = False
    ended_at: float = 0.0


@dataclass(slots=True)
class _Tier:
    """A tier, its reads, and the threads of its lookups, reads and writes."""

    folder: FolderTier
    verified: TierReads
    lookups: Lane
    reads: Lane
    writes: Lane


class KVStore:
    """A store over several tiers.

    ``plan``     spans of the KV cache groups
    ``space``    namespace of the objects
    ``sizes``    payload bytes of an object, by group
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
        # Slots that a running read or write may access after its fetch or store has ended.
        self._lingering: list[tuple[LaneCall[ObjectHeader] | LaneCall[bool], int]] = []
        # Tier label and object of each write in `_lingering`, by id of the call.
        self._writing: dict[int, tuple[str, ObjectName]] = {}
        # Objects stored since the last `take_changes`; None unless `record_changes` was called.
        self._stored: list[tuple[str, ObjectName]] | None = None
        for tier in self._tiers:
            # Read the index in the background: only eviction needs it.
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

        ``names``                names of the request's ``possible_objects``; objects past the known
                                 tokens have no name
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
        """Return whether the request has a fetch."""
        return request_id in self._fetches

    def poll(self, request_id: str) -> Fetched | None:
        """Return the result of a fetch; None while it runs, for at most ``load_s``."""
        fetch = self._fetches[request_id]
        if not fetch.over:
            self._advance(fetch, time.monotonic())
        self._sweep()
        if not fetch.over:
            return None
        machine = fetch.machine
        offsets = {ref: fetch.offsets[ref] for ref in machine.needed}
        present = frozenset(ref for ref, tiers in fetch.tiers.items() if tiers)
        absent = frozenset(ref for ref, misses in fetch.misses.items() if misses == len(self._tiers))
        tier = self._tiers[fetch.slowest].folder.label
        read_bytes, seconds = self.object_bytes(offsets), fetch.ended_at - fetch.began_at
        return Fetched(
            machine.start_token, machine.end_token, offsets, present, absent, tier, read_bytes, seconds, fetch.ended_at
        )

    def stop_fetch(self, request_id: str) -> None:
        """End a fetch now with the longest verified prefix. ``poll`` then returns the result."""
        fetch = self._fetches[request_id]
        self._advance(fetch, time.monotonic())
        if not fetch.over:
            self.counts["late"] += 1
            fetch.machine.give_up()
            self._settle(fetch)

    def idle_s(self, request_id: str) -> float:
        """Return the time since the tiers last delivered bytes to a fetch, in seconds.

        Bytes of any read of a tier count for the queued reads of this tier.
        """
        return self._idle_s(self._fetches[request_id], time.monotonic())

    def object_bytes(self, refs: Iterable[ObjectRef]) -> int:
        """Return the payload bytes of objects."""
        return sum(self._sizes[ref.group] for ref in refs)

    def hand_over(self, request_id: str) -> list[int]:
        """End a fetch and return its slots.

        The caller copies the objects and then frees the slots.
        """
        fetch = self._fetches.pop(request_id)
        return list(fetch.offsets.values())

    def end_fetch(self, request_id: str) -> None:
        """End a fetch and free its slots. Idempotent."""
        fetch = self._fetches.pop(request_id, None)
        if fetch is None:
            return
        for offset in fetch.offsets.values():
            self.staging.give_back(offset)
        self._lingering += [(reading.call, reading.offset) for reading in fetch.readings]
        self._sweep()

    def _advance(self, fetch: _Fetch, now: float) -> None:
        self._take_lookups(fetch, now)
        self._take_reads(fetch)
        hangs = bool(fetch.readings) and self._idle_s(fetch, now) >= self._limits.lookup_s
        if not fetch.machine.settled and (hangs or now >= fetch.began_at + self._limits.load_s):
            self.counts["late"] += 1
            fetch.machine.give_up()
        # A read that cannot start may change the needed objects.
        while reads := fetch.machine.next_reads():
            if not fetch.readings:
                # The time between two polls is the engine's step, not idle time of the tiers.
                fetch.read_at = now - fetch.looked_s
            for ref in reads:
                self._read(fetch, ref, now)
        if fetch.machine.settled:
            self._settle(fetch)

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
            answers = call.result if call.state is CallState.ENDED and call.result is not None else [None] * len(refs)
            for ref, found in zip(refs, answers, strict=True):
                fetch.unanswered[ref].discard(number)
                if found:
                    fetch.tiers.setdefault(ref, []).append(number)
                elif found is not None:
                    fetch.misses[ref] += 1
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
        """Start to read an object from the fastest tier that has it.

        Return None if no tier has it, staging is full, or no such tier accepts the read.
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
        """Copy an object that was read from a slow tier to all faster tiers."""
        assert reading.call.result is not None
        cost_ns = reading.call.result.cost_ns
        for tier in self._tiers[: reading.tier]:
            self._write(tier, name, reading.offset, reading.call.result.payload_bytes, cost_ns)

    def _settle(self, fetch: _Fetch) -> None:
        fetch.over, fetch.ended_at = True, time.monotonic()
        machine = fetch.machine
        needed = set(machine.needed)
        for ref in set(fetch.offsets) - needed:
            self.staging.give_back(fetch.offsets.pop(ref))
        self._lingering += [(reading.call, reading.offset) for reading in fetch.readings]
        fetch.readings = []
        loaded = machine.end_token - machine.start_token
        self.counts["hits" if loaded else "misses"] += 1
        self.counts["hit_tokens"] += loaded
        self.counts["missed_tokens"] += machine.limit_token - machine.end_token

    # Stores.

    def reserve(self, ref: ObjectRef) -> int | None:
        """Reserve a slot of staging for an object to store; return its offset.

        Return None, and count a dropped store, if staging is full or no tier accepts writes.
        """
        self._sweep()
        if all(tier.writes.hangs or tier.writes.pending >= self._limits.queue_objects for tier in self._tiers):
            self.counts["dropped_stores"] += 1
            return None
        offset = self.staging.take(self._sizes[ref.group])
        if offset is None:
            self.counts["dropped_stores"] += 1
        return offset

    def commit(self, ref: ObjectRef, name: ObjectName, offset: int, cost_ns: int) -> bool:
        """Write an object to every tier, once all ranks have filled its slot.

        Return whether a tier has accepted the write.
        """
        written = [self._write(tier, name, offset, self._sizes[ref.group], cost_ns) for tier in self._tiers]
        if not any(written):
            self.counts["dropped_stores"] += 1
        self.staging.give_back(offset)
        return any(written)

    def drop(self, offset: int) -> None:
        """Free the slot of an object that the ranks did not fill."""
        self.counts["dropped_stores"] += 1
        self.staging.give_back(offset)

    def _write(self, tier: _Tier, name: ObjectName, offset: int, size: int, cost_ns: int) -> bool:
        deadline, view = time.monotonic() + self._limits.store_s, self.staging.view(offset, size)
        call = tier.writes.submit(partial(tier.folder.write, name, view, cost_ns, deadline), deadline)
        if call is None:
            return False
        self.staging.share(offset)
        self._lingering.append((call, offset))
        self._writing[id(call)] = (tier.folder.label, name)
        return True

    # Changes, counts and shutdown.

    def record_changes(self) -> None:
        """Start to record stored and removed objects for ``take_changes``."""
        self._stored = []
        for tier in self.tiers:
            tier.removed = deque(maxlen=_KEPT_CHANGES)

    def take_changes(self) -> tuple[list[tuple[str, ObjectName]], list[tuple[str, ObjectName]]]:
        """Return the objects stored and the objects removed since the last call.

        Each entry is (tier label, object). Removals by other processes are not included.
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
        """Return all counts since the start: ``{counter: {label: number}}``."""
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
        """Return whether every committed object has been written or dropped."""
        self._sweep()
        return not self._lingering

    def close(self) -> None:
        """Stop without waiting. Unwritten objects are lost."""
        for tier in self._tiers:
            for lane in (tier.lookups, tier.reads, tier.writes):
                lane.close()
            tier.folder.close()
        self.staging.close()

    def _sweep(self) -> None:
        kept = []
        for call, offset in self._lingering:
            if call.over:
                self.staging.give_back(offset)
                writing = self._writing.pop(id(call), None)
                if writing is not None:
                    self._seconds["stored", writing[0]] += call.seconds
                    if self._stored is not None and call.state is CallState.ENDED:
                        self._stored.append(writing)
            else:
                kept.append((call, offset))
        self._lingering = kept
