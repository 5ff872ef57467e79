"""Eviction order of a tier: GreedyDual over recompute cost per byte. Pure: no clock, no files.

The *age* of a tier starts at 0. An object's *value* is its cost per byte plus the age at its last
use. Eviction removes the object of least value and raises the age to this value, so it eventually
removes all unused objects. Among equal values, it removes the least recently used object first.
With equal costs per byte, this is LRU.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(slots=True)
class Entry:
    """An object of the order.

    ``cost``     cost to recompute the whole object; costs of all objects have the same unit
    ``used_at``  time of its last use on the caller's clock
    """

    size_bytes: int
    cost: float
    used_at: float
    use_number: int = 0


class EvictionOrder(Generic[K]):
    """Objects by value. Operations take amortized logarithmic time."""

    def __init__(self) -> None:
        self._entries: dict[K, Entry] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._age = 0.0
        self._use_numbers = itertools.count()

    def add_used(self, periods: Sequence[Sequence[tuple[K, int, float, float]]]) -> None:
        """Add objects found in files to an empty order. Estimates the age at each one's last use.

        While all objects are replaced once, the age rises by about their mean cost per byte. With
        equal ages instead, a difference in cost, however small, would outweigh days without a use.

        ``periods``  (key, size in bytes, cost, time of the last use) of the objects last used in
                     each period, both from the oldest to the latest. The objects of a period get
                     the same age
        """
        total_bytes = max(1, sum(size_bytes for period in periods for _, size_bytes, *_ in period))
        mean_cost = sum(cost for period in periods for _, _, cost, _ in period) / total_bytes
        older_bytes = 0
        for period in periods:
            self._age = mean_cost * older_bytes / total_bytes
            for key, size_bytes, cost, used_at in period:
                self.add(key, size_bytes, cost, used_at)
                older_bytes += size_bytes
        self._age = mean_cost

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def add(self, key: K, size_bytes: int, cost: float, used_at: float) -> None:
        """Add an object, or update it; both count as a use. Arguments are as in ``Entry``."""
        self._entries[key] = Entry(size_bytes, cost, used_at)
        self.use(key, used_at)

    def use(self, key: K, used_at: float) -> None:
        """Record a use of an object; unknown keys are ignored."""
        entry = self._entries.get(key)
        if entry is None:
            return
        entry.used_at = used_at
        entry.use_number = next(self._use_numbers)
        value = self._age + entry.cost / max(1, entry.size_bytes)
        heapq.heappush(self._heap, (value, entry.use_number, key))
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [item for item in self._heap if self._current(item)]
            heapq.heapify(self._heap)

    def discard(self, key: K) -> None:
        self._entries.pop(key, None)

    def pop(self) -> tuple[K, Entry] | None:
        """Remove the object of least value and return it; None without objects."""
        while self._heap:
            item = heapq.heappop(self._heap)
            if self._current(item):
                value, _, key = item
                self._age = max(self._age, value)
                return key, self._entries.pop(key)
        return None

    def _current(self, item: tuple[float, int, K]) -> bool:
        entry = self._entries.get(item[2])
        return entry is not None and entry.use_number == item[1]
