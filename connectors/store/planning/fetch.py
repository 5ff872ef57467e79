"""State machine of one request's fetch: which objects to look up and to read, and when it ends.

    lookup   ``candidates`` are looked up; ``found`` reports which ones exist
    reading  ``fit`` limits the reads to the free memory; ``next_reads`` are read into staging;
             ``read`` and ``failed`` report the results
    settled  all objects for ``end_token`` are verified, in staging

If an object cannot be read, the fetch continues with the longest prefix that does not need this
object. Sans-I/O: the caller applies the deadlines and calls ``give_up``.
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

    ``start_token``  tokens in the engine's own cache
    ``limit_token``  largest token at which the request may resume
    ``end_token``    token at which it can resume with the current objects
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
    def verified(self) -> frozenset[ObjectRef]:
        """Objects that have been verified in staging."""
        return frozenset(self._verified)

    @property
    def needed(self) -> list[ObjectRef]:
        """Objects needed to resume at ``end_token``."""
        return needed_objects(self._plan, self.start_token, self.end_token)

    @property
    def settled(self) -> bool:
        """True once the fetch has ended."""
        return self._given_up or (not self._looking and self._verified.issuperset(self.needed))

    def found(self, refs: Iterable[ObjectRef], missing: Iterable[ObjectRef]) -> None:
        """Record the answers of a lookup: a tier has ``refs``, no tier has ``missing``."""
        refs, missing = set(refs), set(missing)
        self._present |= refs & self._looking
        self._looking -= refs | missing
        self._choose()

    def stop_looking(self) -> None:
        """End the lookup at its deadline: objects without an answer count as missing."""
        self._looking.clear()
        self._choose()

    def fit(self, sizes: Mapping[int, int], room_bytes: int) -> bool:
        """Lower ``end_token`` until its unread objects fit into memory; return whether it changed.

        ``sizes``       bytes of memory of an object, by group
        ``room_bytes``  free memory
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
        """Return the objects to read now. They count as being read until ``read`` or ``failed``."""
        if self._looking or self._given_up:
            return []
        reads = self._unread(self.end_token)
        self._reading.update(reads)
        return reads

    def read(self, ref: ObjectRef) -> bool:
        """Record a verified object; return whether the fetch still needs it."""
        if ref not in self._reading or self._given_up:
            return False
        self._reading.discard(ref)
        self._verified.add(ref)
        return True

    def failed(self, ref: ObjectRef) -> None:
        """Record an object that could not be read, for example because it is corrupt."""
        self._reading.discard(ref)
        self._present.discard(ref)
        self._choose()

    def give_up(self) -> None:
        """End the fetch at its deadline with the longest prefix of verified objects."""
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
