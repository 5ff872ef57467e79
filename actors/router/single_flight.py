"""One answer for all who ask at about the same time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class SingleFlight(Generic[Answer]):
    """Call it for an answer that was made at most `age_s` ago; those who come while one is made wait for that one."""

    def __init__(self, make: Callable[[], Awaitable[Answer]], age_s: float) -> None:
        self._make = make
        self._age_s = age_s
        self._lock = asyncio.Lock()
        self._made: tuple[float, Answer] | None = None

    async def __call__(self) -> Answer:
        """Raises what making it raises; that is not kept."""
        async with self._lock:
            if self._made is None or time.monotonic() - self._made[0] > self._age_s:
                answer = await self._make()
                # Counted from its end: else those who waited for one that took long would each make another.
                self._made = time.monotonic(), answer
            return self._made[1]
