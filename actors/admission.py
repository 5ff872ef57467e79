"""How many requests each key has in this router at once."""

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from actors.leg import OverloadedError


class Places:
    """Counts what is taken; a key that has nothing here takes no memory."""

    def __init__(self) -> None:
        self._taken: Counter[Hashable] = Counter()

    def snapshot(self) -> dict[Hashable, int]:
        """Return how many each key has now; a copy."""
        return dict(self._taken)

    @contextmanager
    def taken(self, key: Hashable, most: int) -> Iterator[None]:
        """Hold one of `most` places; raises OverloadedError when `key` has that many already."""
        if self._taken[key] >= most:
            raise OverloadedError(f"{self._taken[key]} requests of this API key are being served, which is its limit")
        self._taken[key] += 1
        try:
            yield
        finally:
            self._taken[key] -= 1
            if not self._taken[key]:
                del self._taken[key]
