"""Remember in bounded memory which keys have been forgotten."""

from __future__ import annotations

from collections.abc import Hashable

_BITS = 2**23


class ForgottenKeys:
    """Set of keys in 1 MiB, which may also contain keys that were never added.

    After n additions, it contains about n / 2^23 of all other keys. Callers must therefore treat
    the keys in it with more caution than necessary, never with less.
    """

    def __init__(self) -> None:
        self._bits: bytearray | None = None

    def add(self, key: Hashable) -> None:
        if self._bits is None:  # most processes forget nothing
            self._bits = bytearray(_BITS // 8)
        bit = hash(key) % _BITS
        self._bits[bit // 8] |= 1 << bit % 8

    def __contains__(self, key: Hashable) -> bool:
        bit = hash(key) % _BITS
        return self._bits is not None and bool(self._bits[bit // 8] >> bit % 8 & 1)
