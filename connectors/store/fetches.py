"""Fetches: look up the objects that a request could load, and read them into staging memory.

``Fetches.begin`` starts to look up the objects of a request. Repeated calls of ``poll`` start the
reads of found objects into slots, unless the caller declines them, and return the result once the
fetch has ended; ``stop`` ends it early. ``hand_over`` passes the slots to the caller; ``end`` frees
them. The state machine of a fetch is in ``planning/fetch.py``; this module runs its lookups and
reads on the tiers' threads.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf

from connectors.store.planning.fetch import Fetch
from connectors.store.planning.prefix import ObjectRef
from connectors.store.planning.spans import StorePlan
from connectors.store.tier_threads import StoreLimits, TierThreads
from connectors.store.tiers.lanes import CallState, LaneCall
from connectors.store.tiers.objects import ObjectHeader, ObjectName
from connectors.store.tiers.reads import Progress
from connectors.store.tiers.slot_calls import SlotCalls
from connectors.store.tiers.staging import Staging, slot_bytes
from connectors.store.writer import ObjectWriter

_LOOKUPS_PER_CALL = 64

Accept = Callable[[int, int, Mapping[str, int]], bool]
"""Called with the first token, the end token, and the payload bytes by tier label of a load.

False declines the load.
"""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Result of a fetch: the request can resume at ``end_token`` (``planning/prefix.py``).

    ``start_token``  number of tokens in the engine's own cache when the fetch began
    ``end_token``    number of tokens with KV after the load; ``start_token`` without a load
    ``offsets``      offset in staging of each verified object that the load needs
    ``present``      objects that lookups found in time, without those that no tier could read. If
                     the load was declined, only those in the fastest tier: others are worth a copy
    ``declined``     whether the caller declined the load after the lookups
    ``tier``         label of the slowest tier from which an object was verified; without a verified
                     object, label of the fastest tier
    ``reads``        verified payload bytes of each tier and their duration in seconds: lookups, and
                     the time from the first read to the end of the last one. 0 bytes for a tier of
                     which no read had ended when the fetch ended late
    ``seconds``      duration of the fetch
    ``ended_at``     end of the fetch, in ``time.monotonic()`` seconds
    """

    start_token: int
    end_token: int
    offsets: Mapping[ObjectRef, int]
    present: frozenset[ObjectRef]
    declined: bool = False
    tier: str = ""
    reads: Mapping[str, tuple[int, float]] = field(default_factory=dict)
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
class _Measured:
    """Reads of one tier for one fetch: start of the first, verified bytes, end of the last.

    ``ended_at``  0 until an object is verified
    """

    began_at: float
    read_bytes: int = 0
    ended_at: float = 0.0


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
    ``accept``      decides after the lookups whether to read
    ``decided``     whether the lookups have ended and ``accept`` was called if they found anything
    ``declined``    whether ``accept`` has returned False
    ``slowest``     number of the slowest tier from which an object was verified
    ``lookups_s``   total duration of the lookups, by number of the tier
    ``measured``    reads, by number of the tier
    ``ended_at``    end of the fetch
    """

    machine: Fetch
    accept: Accept
    names: dict[ObjectRef, ObjectName]
    began_at: float
    read_at: float
    lookups: list[tuple[int, list[ObjectRef], LaneCall[list[bool]]]] = field(default_factory=list)
    unanswered: dict[ObjectRef, set[int]] = field(default_factory=dict)
    tiers: dict[ObjectRef, list[int]] = field(default_factory=dict)
    readings: list[_Reading] = field(default_factory=list)
    offsets: dict[ObjectRef, int] = field(default_factory=dict)
    looked_s: float = 0.0
    decided: bool = False
    declined: bool = False
    slowest: int = 0
    lookups_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    measured: dict[int, _Measured] = field(default_factory=dict)
    over: bool = False
    ended_at: float = 0.0


class Fetches:
    """Fetches of one engine's store, at most one per request.

    ``plan``        spans of the KV cache groups
    ``sizes``       payload bytes of an object, by index of each group that has objects
    ``tiers``       tiers, fastest first
    ``slot_calls``  calls that use slots of ``staging``; ``Fetches`` adds reads of ended fetches
    ``writer``      copies objects to the tiers that are faster than the one they were read from
    ``counts``      number of events since the start, by event
    ``seconds``     total duration of reads, by tier label, in seconds
    """

    def __init__(
        self,
        plan: StorePlan,
        sizes: Mapping[int, int],
        tiers: Sequence[TierThreads],
        staging: Staging,
        slot_calls: SlotCalls,
        writer: ObjectWriter,
        limits: StoreLimits,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._plan = plan
        self._sizes = sizes
        self._slots = {group: slot_bytes(size) for group, size in sizes.items()}
        self._tiers = tiers
        self._staging = staging
        self._slot_calls = slot_calls
        self._writer = writer
        self._limits = limits
        self._fetches: dict[str, _Fetch] = {}

    def begin(
        self,
        request_id: str,
        names: Mapping[ObjectRef, ObjectName],
        start_token: int,
        limit_token: int,
        full_attention_only: bool = False,
        accept: Accept = lambda start_token, end_token, sizes: True,
    ) -> None:
        """Start to look up the objects that a request could load beyond ``start_token``.

        Ends an earlier fetch of this request.

        ``names``                names of the request's ``possible_objects``; an object without a
                                 name counts as missing
        ``limit_token``          largest token at which the request may resume
                                 (``planning/prefix.py``)
        ``full_attention_only``  whether a transfer supplies windows and states
        ``accept``               decides, once the lookups have found something, whether to read it
        """
        self.end(request_id)
        now = time.monotonic()
        machine = Fetch(self._plan.full_attention if full_attention_only else self._plan, start_token, limit_token)
        fetch = _Fetch(machine, accept, dict(names), now, now)
        self._fetches[request_id] = fetch
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

    def __contains__(self, request_id: str) -> bool:
        """Return whether the request has a fetch, in progress or with a result."""
        return request_id in self._fetches

    def poll(self, request_id: str) -> Fetched | None:
        """Continue a fetch and return its result, or None while it runs.

        From ``load_s`` after the start of the fetch, every call returns a result.
        """
        fetch = self._fetches[request_id]
        if not fetch.over:
            self._advance(fetch, time.monotonic())
        self._slot_calls.sweep()
        if not fetch.over:
            return None
        machine = fetch.machine
        offsets = {ref: fetch.offsets[ref] for ref in machine.needed}
        present = frozenset(
            ref for ref, tiers in fetch.tiers.items() if (0 in tiers if fetch.declined else bool(tiers))
        )
        reads = {
            self._tiers[number].folder.label: (each.read_bytes, fetch.lookups_s[number] + each.ended_at - each.began_at)
            for number, each in fetch.measured.items()
            if each.ended_at
        }
        return Fetched(
            machine.start_token,
            machine.end_token,
            offsets,
            present,
            fetch.declined,
            self._tiers[fetch.slowest].folder.label,
            reads,
            fetch.ended_at - fetch.began_at,
            fetch.ended_at,
        )

    def stop(self, request_id: str) -> None:
        """End a fetch now. ``poll`` then returns the longest prefix of verified objects."""
        fetch = self._fetches[request_id]
        now = time.monotonic()
        self._advance(fetch, now)
        if not fetch.over:
            self._end_late(fetch, now)
            self._settle(fetch)

    def idle_s(self, request_id: str) -> float:
        """Return the time for which a fetch has waited for bytes of the tiers, in seconds.

        Before the first bytes this is the time that its lookups and reads have taken. Bytes of any
        read of a tier count for the queued reads of this tier. A read that starts again on another
        tier sets the time back to 0.
        """
        return self._idle_s(self._fetches[request_id], time.monotonic())

    def hand_over(self, request_id: str) -> list[int]:
        """Forget a fetch that has a result, and return the offsets of its slots.

        The caller frees the slots (``Staging.give_back``) when all ranks have ended the load.
        """
        fetch = self._fetches.pop(request_id)
        return list(fetch.offsets.values())

    def end(self, request_id: str) -> None:
        """Forget a fetch, if there is one, and free its slots.

        The slot of a running read is freed once the read has ended.
        """
        fetch = self._fetches.pop(request_id, None)
        if fetch is None:
            return
        for offset in fetch.offsets.values():
            self._staging.give_back(offset)
        self._abandon(fetch.readings)
        self._slot_calls.sweep()

    @property
    def pending(self) -> int:
        """Number of fetches that have not ended."""
        return sum(not fetch.over for fetch in self._fetches.values())

    def _advance(self, fetch: _Fetch, now: float) -> None:
        self._take_lookups(fetch, now)
        self._take_reads(fetch)
        hangs = bool(fetch.readings) and self._idle_s(fetch, now) >= self._limits.lookup_s
        if not fetch.machine.settled and (hangs or now >= fetch.began_at + self._limits.load_s):
            self._end_late(fetch, now)
        if not fetch.decided and not fetch.machine.looking:
            self._decide_load(fetch)
        # A read that cannot start may change the needed objects.
        while reads := self._next_reads(fetch):
            if not fetch.readings:
                # The time between two polls is the engine's step, not idle time of the tiers.
                fetch.read_at = now - fetch.looked_s
            for ref in reads:
                self._read(fetch, ref, now)
        if fetch.machine.settled:
            self._settle(fetch)

    def _end_late(self, fetch: _Fetch, now: float) -> None:
        self.counts["late"] += 1
        for each in fetch.readings:
            fetch.measured[each.tier].ended_at = now
        fetch.machine.give_up()

    def _decide_load(self, fetch: _Fetch) -> None:
        """Let the caller decide, once, whether to read what the lookups have found."""
        machine, fetch.decided = fetch.machine, True
        self._fit(fetch)
        sizes: Counter[str] = Counter()
        for ref in machine.needed:
            sizes[self._tiers[min(fetch.tiers[ref])].folder.label] += self._sizes[ref.group]
        if sizes and not fetch.accept(machine.start_token, machine.end_token, sizes):
            self.counts["declined"] += 1
            fetch.declined = True
            machine.give_up()

    def _next_reads(self, fetch: _Fetch) -> list[ObjectRef]:
        """Return the objects to read now, of the longest prefix that fits into staging.

        First frees unneeded slots, then lowers ``end_token`` if there is too little room.
        """
        self._free_unneeded(fetch)
        self._fit(fetch)
        return fetch.machine.next_reads()

    def _fit(self, fetch: _Fetch) -> None:
        if fetch.machine.fit(self._slots, self._staging.size_bytes - self._staging.used_bytes):
            self.counts["no_room_to_load"] += 1

    def _free_unneeded(self, fetch: _Fetch) -> None:
        """Free the slots of objects past ``end_token``, which only decreases once reads start."""
        for ref in fetch.offsets.keys() - set(fetch.machine.needed):
            self._staging.give_back(fetch.offsets.pop(ref))

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
            fetch.lookups_s[number] += call.seconds
            if not call.started:
                self.counts["late_lookups"] += 1  # its deadline passed while other lookups ran
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
            self.seconds[self._tiers[each.tier].folder.label] += each.call.seconds
            if each.call.state is CallState.ENDED and fetch.machine.read(each.ref):
                fetch.offsets[each.ref] = each.offset
                fetch.read_at = time.monotonic()
                fetch.slowest = max(fetch.slowest, each.tier)
                measured = fetch.measured[each.tier]
                measured.read_bytes += self._sizes[each.ref.group]
                measured.ended_at = max(measured.ended_at, each.call.ended_at)
                assert each.call.result is not None
                self._writer.promote(fetch.names[each.ref], each.offset, each.call.result, each.tier)
            else:
                self._staging.give_back(each.offset)
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
        offset = self._staging.take(size)
        if offset is None:
            self.counts["no_room_to_load"] += 1
            return None
        for number in sorted(fetch.tiers[ref]):
            tier, name, view = self._tiers[number], fetch.names[ref], self._staging.view(offset, size)
            deadline = max(now, fetch.began_at + self._limits.load_s)
            progress = Progress()
            call = tier.reads.submit(partial(tier.verified.read, name, view, progress), deadline)
            if call is not None:
                fetch.measured.setdefault(number, _Measured(now))
                return _Reading(ref, offset, number, call, progress)
        self._staging.give_back(offset)
        return None

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
        """Cancel queued reads. ``SlotCalls.sweep`` frees the slot of a read that has ended."""
        for each in readings:
            lane = self._tiers[each.tier].reads
            lane.cancel(each.call)
            self._slot_calls.add(lane, each.call, each.offset)
