"""Share the result of a call among concurrent callers, and keep it for a short time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class SingleFlight(Generic[Answer]):
    """Shared result of `make`, called again if the last call ended over `age_s` seconds ago.

    Concurrent callers wait for one call. If it fails, the next of them makes another call.
    """

    def __init__(self, make: Callable[[], Awaitable[Answer]], age_s: float) -> None:
        self._make = make
        self._age_s = age_s
        self._lock = asyncio.Lock()
        self._made: tuple[float, Answer] | None = None

    async def __call__(self) -> Answer:
        """Return the result. Passes on the call's exceptions; does not cache them."""
        async with self._lock:
            if self._made is None or time.monotonic() - self._made[0] > self._age_s:
                answer = await self._make()
                # The age starts at the end of the call: otherwise each caller that waited for a
                # slow call would repeat it.
                self._made = time.monotonic(), answer
            return self._made[1]
