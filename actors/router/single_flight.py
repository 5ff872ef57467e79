"""One result for callers that ask at about the same time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class SingleFlight(Generic[Answer]):
    """Returns a result at most `age_s` old; concurrent callers wait for the same call."""

    def __init__(self, make: Callable[[], Awaitable[Answer]], age_s: float) -> None:
        self._make = make
        self._age_s = age_s
        self._lock = asyncio.Lock()
        self._made: tuple[float, Answer] | None = None

    async def __call__(self) -> Answer:
        """Return the result. Raises what the call raises; errors are not kept."""
        async with self._lock:
            if self._made is None or time.monotonic() - self._made[0] > self._age_s:
                answer = await self._make()
                # Age counts from the call's end: else callers that waited for a slow call would
                # each make another.
                self._made = time.monotonic(), answer
            return self._made[1]
