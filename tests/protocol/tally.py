"""A digest over whatever a test keeps in place of bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from connectors.planning.blocks import Ints


class Tally:
    """Digests ``content(block id)`` of every unit, group by group, as ``TransferDigest`` does with bytes."""

    def __init__(self, content: Callable[[int], object] = lambda block: block) -> None:
        self._content = content
        self.seen: dict[int, list[object]] = {}

    def add(self, group: int, ids: Ints, parts: Ints, layers: tuple[int, int] | None = None) -> None:
        contents = (self._content(block) for block in ids.tolist())
        self.seen.setdefault(group, []).extend(content for content in contents if content is not None)

    def hexdigest(self) -> str:
        seen = sorted((group, contents) for group, contents in self.seen.items() if contents)
        return hashlib.md5(repr(seen).encode()).hexdigest()
