"""State machine of one request's fetch: which stored objects to look up and read, and when it ends.

A fetch brings the objects of the longest usable prefix from the tiers into staging memory.

    lookup   the caller looks ``candidates`` up; ``found`` records which ones exist;
             ``stop_looking`` ends the lookup at its deadline
    reading  ``fit`` limits the reads to the free memory; the caller reads ``next_reads`` into
             staging; ``read`` and ``failed`` record the results; ``give_up`` ends the fetch
             early, for example at its deadline
    settled  all objects that a resume (``prefix.py``) at ``end_token`` needs are verified and in
             staging

If an object cannot be read, the fetch continues with the longest prefix that does not need this
object. Sans-I/O: files, memory and deadlines are the caller's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping

from connectors.store.planning.prefix import (
    ObjectRef,
    needed_objects,
    possible_objects,
    resume_points,
    usable_prefix,
)
from connectors.store.planning.spans import StorePlan


class Fetch:
    """Fetch of one request.

    ``start_token``  number of tokens in the engine's own cache
    ``limit_token``  largest token at which the request may resume
    ``candidates``   objects that a resume could need, sorted by end, then group
    ``end_token``    largest token at which the request can resume with the objects that are
                     present, as lowered by ``fit``; ``start_token`` during the lookup
    """

    def __init__(self, plan: StorePlan, start_token: int, limit_token: int) -> None:
        self._plan = plan
        self.start_token = start_token
        self.limit_token = limit_token
        self.candidates = tuple(possible_objects(plan, start_token, limit_token))
        self._looking = set(self.candidates)
        self._present: set[ObjectRef] = set()
        self._reading: set[ObjectRef] = set()
        self._verified: set[ObjectRef] = set()
        self._given_up = False
        # Largest token whose objects fit into the caller's memory.
        self._room_token = limit_token
        self.end_token = start_token

    @property
    def looking(self) -> bool:
        """True until all candidates have an answer, or the lookup has ended early."""
        return bool(self._looking)

    @property
    def verified(self) -> frozenset[ObjectRef]:
        """Objects that ``read`` has recorded, also those that are not needed any more."""
        return frozenset(self._verified)

    @property
    def needed(self) -> list[ObjectRef]:
        """Objects needed to resume at ``end_token``, sorted by end, then group."""
        return needed_objects(self._plan, self.start_token, self.end_token)

    @property
    def settled(self) -> bool:
        """True after ``give_up``, or once all needed objects are verified."""
        return self._given_up or (not self._looking and self._verified.issuperset(self.needed))

    def found(self, refs: Iterable[ObjectRef], missing: Iterable[ObjectRef]) -> None:
        """Record answers of the lookup: a tier has ``refs``, no tier has ``missing``."""
        refs, missing = set(refs), set(missing)
        self._present |= refs & self._looking
        self._looking -= refs | missing
        self._choose()

    def stop_looking(self) -> None:
        """End the lookup at its deadline: objects without an answer count as missing."""
        self._looking.clear()
        self._choose()

    def fit(self, sizes: Mapping[int, int], room_bytes: int) -> bool:
        """Lower ``end_token`` until the objects still to be read fit; return whether it changed.

        Does nothing during the lookup and after ``give_up``.

        ``sizes``       bytes of memory that an object takes, by group
        ``room_bytes``  bytes of free memory
        """

        def unread_bytes(limit_token: int) -> int:
            end = usable_prefix(self._plan, self._present, self.start_token, limit_token)
            return sum(sizes[ref.group] for ref in self._unread(end))

        if self._looking or self._given_up or unread_bytes(self.end_token) <= room_bytes:
            return False
        points = [*resume_points(self._plan, self.start_token, self.end_token), self.start_token][::-1]
        self._room_token = points[bisect_right(points, room_bytes, key=unread_bytes) - 1]
        self._choose()
        return True

    def next_reads(self) -> list[ObjectRef]:
        """Return the objects to read now; none during the lookup and after ``give_up``.

        They count as being read until ``read`` or ``failed``.
        """
        if self._looking or self._given_up:
            return []
        reads = self._unread(self.end_token)
        self._reading.update(reads)
        return reads

    def read(self, ref: ObjectRef) -> bool:
        """Record a verified object; do nothing and return False unless it is being read."""
        if ref not in self._reading or self._given_up:
            return False
        self._reading.discard(ref)
        self._verified.add(ref)
        return True

    def failed(self, ref: ObjectRef) -> None:
        """Record an object that could not be read, for example because it is corrupt or missing."""
        self._reading.discard(ref)
        self._present.discard(ref)
        self._choose()

    def give_up(self) -> None:
        """End the fetch now, with the longest prefix of verified objects."""
        self._looking.clear()
        self._present = set(self._verified)
        self._reading.clear()
        self._given_up = True
        self._choose()

    def _unread(self, end_token: int) -> list[ObjectRef]:
        needed = needed_objects(self._plan, self.start_token, end_token)
        return [ref for ref in needed if ref not in self._reading and ref not in self._verified]

    def _choose(self) -> None:
        if not self._looking:
            self.end_token = usable_prefix(self._plan, self._present, self.start_token, self._room_token)
