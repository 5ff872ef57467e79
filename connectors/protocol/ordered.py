"""Selection of expired items from a dict that is ordered by deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


def due(items: Mapping[_K, _V], is_due: Callable[[_V], bool]) -> list[_K]:
    """Return the keys of the leading items that are due.

    >>> due({"a": 1, "b": 2, "c": 5}, lambda at: at < 3)
    ['a', 'b']
    """
    found: list[_K] = []
    for key, value in items.items():
        if not is_due(value):
            break
        found.append(key)
    return found
