"""A digest over the tags that tests keep instead of bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from connectors.planning.blocks import Ints


class Tally:
    """Digest of ``content(block id, layer)`` of every unit, layer by layer; ``TransferDigest``
    digests bytes.
    """

    def __init__(self, content: Callable[[int, int], object] = lambda block, layer: block, layers: int = 1) -> None:
        self._content = content
        self._layers = layers
        self.seen: dict[tuple[int, int], list[object]] = {}

    def add(self, group: int, ids: Ints, parts: Ints, layers: tuple[int, int] | None = None) -> None:
        first, stop = layers or (0, self._layers)
        for layer in range(first, min(stop, self._layers)):
            contents = (self._content(block, layer) for block in ids.tolist())
            self.seen.setdefault((group, layer), []).extend(content for content in contents if content is not None)

    def ready(self) -> bool:
        return True

    def hexdigest(self) -> str:
        seen = sorted((group, contents) for group, contents in self.seen.items() if contents)
        return hashlib.md5(repr(seen).encode()).hexdigest()
