"""One request's load: look up the objects that it could need, and read them into staging memory.

lookup   of all objects in all tiers; ends once the fastest tier of each object is known, or
         after ``lookup_s``. Then measured rates decide whether to read, and how long the
         request may wait (``load_costs.py``)
reading  the objects of the longest prefix that fits into staging. If an object cannot be read
         from any tier, the fetch continues with the longest prefix that does not need it
over     all objects that a resume at ``end_token`` needs are verified and in staging
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

from connectors.store.keys.names import ObjectName
from connectors.store.planning.prefix import ObjectRef, needed_objects, resume_points, usable_prefix
from connectors.store.service import KVStore
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.lanes import Call
from connectors.store.tiers.staging import slot_bytes


class Fetch:
    """Load of one request, in progress or with a result.

    ``names``            names of the request's ``possible_objects``
    ``start_token``      number of tokens in the engine's own cache
    ``limit_token``      largest token at which the request may resume
    ``beside_transfer``  whether a transfer supplies windows, states and what is not loaded; its
                         time then bounds the wait, else the time of the computation

    Once ``over``:

    ``end_token``  number of tokens with KV after the load
    ``present``    objects found in time, without those that no tier could read. If the load was
                   declined, only those in the fastest tier: others are worth a copy
    ``tier``       label of the slowest tier from which an object was verified
    """

    def __init__(
        self,
        store: KVStore,
        names: Mapping[ObjectRef, ObjectName],
        start_token: int,
        limit_token: int,
        beside_transfer: bool = False,
    ) -> None:
        self.start_token = self.end_token = start_token
        self.beside_transfer = beside_transfer
        self.over = self.declined = False
        self.began_at = time.monotonic()
        self.ended_at = 0.0
        self._store = store
        self._plan = store.plan.full_attention if beside_transfer else store.plan
        self._names = names
        self._limit_token = self._room_token = limit_token
        # Offsets in staging of verified objects.
        self.offsets: dict[ObjectRef, int] = {}
        # Fastest tier that may have an object; it rises when a read fails.
        self._tiers: dict[ObjectRef, int] = {}
        # Verified, or can still be read.
        self._usable: set[ObjectRef] = set()
        self._reading: dict[ObjectRef, tuple[int, Call]] = {}
        # Start, verified bytes and end of the reads of each tier.
        self._measured: dict[int, tuple[float, int, float]] = {}
        self._slowest = 0
        # Time from which the fetch waits for bytes of a tier.
        self._read_at = self.began_at
        # How long, and since when, only the fetch delays the request, after the lookups.
        self._patience_s = math.inf
        self._ready_at: float | None = None
        self._queued = False
        self._candidates = list(names)
        self._looking = True
        # Call of each tier, unless its lane has rejected it, and the answers so far, by candidate.
        self._lookups: list[tuple[Call | None, list[bool]]] = []
        look_for, until = [names[ref] for ref in self._candidates], self.began_at + store.settings.lookup_s
        for tier in store.tiers:
            answers: list[bool] = []
            find = partial(_find, tier.folder, look_for, until, answers)
            self._lookups.append((tier.lookups.submit(find, until), answers))
        store.running.add(self)

    @property
    def present(self) -> frozenset[ObjectRef]:
        return frozenset(ref for ref, tier in self._tiers.items() if not (self.declined and tier))

    @property
    def tier(self) -> str:
        return self._store.tiers[self._slowest].label

    def poll(self, queued: bool = False) -> bool:
        """Continue the fetch; return whether it is over. It is after ``load_s``.

        ``queued``  whether the request could not run without the fetch either, so waiting is free
        """
        self._queued = queued
        now = time.monotonic()
        self._advance(now)
        if not (self.over or self._looking or queued):
            self._ready_at = now if self._ready_at is None else self._ready_at
            if now - self._ready_at >= self._patience_s:
                self._end_late(now)
        return self.over

    def hand_over(self) -> dict[ObjectRef, int]:
        """The caller frees the slots."""
        offsets, self.offsets = self.offsets, {}
        return offsets

    def close(self) -> None:
        self._stop()
        for offset in self.hand_over().values():
            self._store.staging.give_back(offset)

    def _advance(self, now: float) -> None:
        self._store.sweep()
        if not self.over and self._looking:
            self._look(now)
        if self.over or self._looking:
            return
        settings = self._store.settings
        hangs = bool(self._reading) and self._idle_s(now) >= settings.lookup_s
        if not self._verified() and (hangs or now >= self.began_at + settings.load_s):
            self._end_late(now)
            return
        # A read that cannot start changes the needed objects.
        while refs := self._to_read():
            if not self._reading:
                # The lookups have delivered, and the time between two polls is the engine's step.
                self._read_at = now
            for ref in refs:
                self._read(ref)
        if self._verified():
            self._settle()

    def _look(self, now: float) -> None:
        late = now >= self.began_at + min(self._store.settings.lookup_s, self._store.settings.load_s)
        # Read before the answers, which threads still add.
        ended = [late or call is None or call.over for call, _ in self._lookups]
        for at, ref in enumerate(self._candidates):
            for number, (_, answers) in enumerate(self._lookups):
                if at < len(answers):
                    if answers[at]:
                        self._tiers[ref] = number
                        break
                elif not ended[number]:
                    return
        for over, (call, answers) in zip(ended, self._lookups, strict=True):
            if over and call is not None and len(answers) < len(self._candidates):
                self._store.count_problem("late_lookup")
        self._looking, self._usable = False, set(self._tiers)
        self._choose()
        self._decide()

    def _decide(self) -> None:
        self._fit()
        costs, sizes = self._store.costs, Counter[str]()
        for ref in self._needed():
            sizes[self._store.tiers[self._tiers[ref]].label] += self._store.sizes[ref.group]
        if not sizes or (self._store.settings.always_load and not self.beside_transfer):
            return
        if self.beside_transfer:
            otherwise_s = costs.transfer_s(sizes.total())
        else:
            otherwise_s = costs.compute_s(self.start_token, self.end_token)
        self._patience_s = costs.patience_s(sizes, otherwise_s)
        if self._patience_s <= 0 and not self._queued:
            self.declined, self.end_token = True, self.start_token
            self._settle()

    def _looked_s(self, number: int) -> float:
        call, _ = self._lookups[number]
        return 0.0 if call is None else call.seconds

    def _verified(self) -> bool:
        return self.offsets.keys() >= set(self._needed())

    def _needed(self) -> list[ObjectRef]:
        return needed_objects(self._plan, self.start_token, self.end_token)

    def _unread(self, end_token: int | None = None) -> list[ObjectRef]:
        needed = needed_objects(self._plan, self.start_token, self.end_token if end_token is None else end_token)
        return [ref for ref in needed if ref not in self._reading and ref not in self.offsets]

    def _choose(self) -> None:
        self.end_token = usable_prefix(self._plan, self._usable, self.start_token, self._room_token)

    def _fit(self) -> None:
        """Lower ``end_token`` until the objects still to be read fit into staging."""
        room = self._store.staging.size_bytes - self._store.staging.used_bytes

        def unread_bytes(limit_token: int) -> int:
            end = usable_prefix(self._plan, self._usable, self.start_token, limit_token)
            return sum(slot_bytes(self._store.sizes[ref.group]) for ref in self._unread(end))

        if unread_bytes(self.end_token) > room:
            self._store.count_problem("no_staging_for_load")
            points = [*resume_points(self._plan, self.start_token, self.end_token), self.start_token][::-1]
            self._room_token = points[bisect_right(points, room, key=unread_bytes) - 1]
            self._choose()

    def _to_read(self) -> list[ObjectRef]:
        self._free_unneeded()
        self._fit()
        return self._unread()

    def _free_unneeded(self) -> None:
        for ref in self.offsets.keys() - set(self._needed()):
            self._store.staging.give_back(self.offsets.pop(ref))

    def _read(self, ref: ObjectRef) -> None:
        size = self._store.sizes[ref.group]
        offset = self._store.staging.take(size)
        if offset is None:
            self._store.count_problem("no_staging_for_load")
        else:
            view, now = self._store.staging.view(offset, size), time.monotonic()
            for number in range(self._tiers[ref], len(self._store.tiers)):
                lane, folder = self._store.tiers[number].reads, self._store.tiers[number].folder
                deadline = max(now, self.began_at + self._store.settings.load_s)
                read, then = partial(_read, folder, self._names[ref], view), partial(self._read_ended, ref, offset)
                if call := lane.submit(read, deadline, then):
                    self._tiers[ref] = number
                    self._measured.setdefault(number, (now, 0, 0.0))
                    self._reading[ref] = number, call
                    return
            self._store.staging.give_back(offset)
        self._usable.discard(ref)
        self._choose()

    def _read_ended(self, ref: ObjectRef, offset: int, call: Call) -> None:
        if self.over:
            self._store.staging.give_back(offset)
            return
        number, _ = self._reading.pop(ref)
        self._read_at = time.monotonic()
        label, size = self._store.tiers[number].label, self._store.sizes[ref.group]
        self._store.counts["store_loaded_seconds", label] += call.seconds
        if call.ok:
            self._store.counts["store_loaded_bytes", label] += size
            began_at, read_bytes, ended_at = self._measured[number]
            self._measured[number] = began_at, read_bytes + size, max(ended_at, call.ended_at)
            self._slowest = max(self._slowest, number)
            self.offsets[ref] = offset
            self._store.promote(self._names[ref], offset, size, number)
            return
        self._store.staging.give_back(offset)
        self._store.count_problem("failed_load")
        # A slower tier may have it, too.
        self._tiers[ref] = number + 1
        if number + 1 == len(self._store.tiers):
            del self._tiers[ref]
            self._usable.discard(ref)
            self._choose()

    def _idle_s(self, now: float) -> float:
        return now - max(self._read_at, *(call.heard_at for _, call in self._reading.values()))

    def _end_late(self, now: float) -> None:
        self._store.count_problem("late_load")
        for number, _ in self._reading.values():
            self._measured[number] = *self._measured[number][:2], now
        self._usable = set(self.offsets)
        self._choose()
        self._settle()

    def _settle(self) -> None:
        self._free_unneeded()
        counts, loaded = self._store.counts, self.end_token - self.start_token
        counts["store_requests", "hit" if loaded else "declined" if self.declined else "miss"] += 1
        counts["store_tokens", "hit"] += loaded
        counts["store_tokens", "miss"] += self._limit_token - self.end_token
        for number, (began_at, size, ended_at) in self._measured.items():
            label = self._store.tiers[number].label
            # A read that ended because the transfer became due is no measurement.
            if ended_at and (size or self._patience_s > 0):
                self._store.costs.read(label, size, self._looked_s(number) + ended_at - began_at)
        self._stop()

    def _stop(self) -> None:
        if not self.over:
            self.over, self.ended_at = True, time.monotonic()
            self._store.running.discard(self)
            for number, call in self._reading.values():
                self._store.tiers[number].reads.cancel(call)
            self._reading.clear()
            self._store.sweep()


def _find(folder: FolderTier, names: Sequence[ObjectName], until: float, answers: list[bool], call: Call) -> None:
    for name in names:
        if time.monotonic() >= until:
            return
        answers.append(folder.find(name))


def _read(folder: FolderTier, name: ObjectName, view: memoryview, call: Call) -> None:
    folder.read(name, view, call.progress)
