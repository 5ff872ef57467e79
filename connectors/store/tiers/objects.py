"""File of a stored object: 16 bytes, the xxh3_128 of its name and payload, then the payload.

The version of this format is part of the namespace (``keys/names.py``), and so of the name.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ObjectName:
    """Name of an object: ``key`` in the namespace ``space``.

    ``end_token``  number of tokens up to the object's end; orders evictions
    """

    space: bytes
    key: bytes
    end_token: int = 0

    @property
    def path(self) -> tuple[str, str]:
        return self.space.hex(), self.key.hex()

    def digest(self) -> xxhash.xxh3_128:
        """Return a digest that the payload is to be added to: a moved or copied file is corrupt."""
        return xxhash.xxh3_128(self.space + self.key)
