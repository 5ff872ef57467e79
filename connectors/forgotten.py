"""Bloom filter with one hash for forgotten keys."""

from __future__ import annotations

from collections.abc import Hashable

_BITS = 2**23


class ForgottenKeys:
    """Set of keys in 1 MiB with false positives: after n additions, their rate is about n / 2^23.

    A hit may only make callers more cautious.
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
