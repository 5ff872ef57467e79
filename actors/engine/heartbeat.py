"""Is there life in an engine that says nothing?

A request may wait for minutes in the queue of an engine that is busy, or has preempted it: that is no reason to give
the engine up. Its core answers questions between two steps, so it is asked one every `BEAT_S` while calls are open.
Each answer is passed on to all of them, and whoever waits for one hears that the engine lives; a core that is stopped,
or whose workers are, answers nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from configs.settings import BEAT_S

logger = logging.getLogger(__name__)


class HeartbeatMonitor:
    """`ask` puts a question to the engine's core; its answer does not matter, only that there is one."""

    def __init__(self, ask: Callable[[], Awaitable[object]], every_s: float = BEAT_S) -> None:
        self._ask = ask
        self._every_s = every_s
        self._listeners: set[Callable[[], None]] = set()
        self._asking: asyncio.Task[None] | None = None

    @contextmanager
    def subscribed(self, beat: Callable[[], None]) -> Iterator[None]:
        """Call `beat` after every answer of the core, until the block ends."""
        self._listeners.add(beat)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_forever(), name="heartbeats")
        try:
            yield
        finally:
            self._listeners.discard(beat)
            if not self._listeners and self._asking is not None:
                self._asking.cancel()
                self._asking = None

    async def _ask_forever(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            try:
                await self._ask()
            except Exception as error:
                # The calls themselves will say more of an engine that has died.
                logger.warning("the engine's core cannot be asked: %r", error)
                continue
            for beat in tuple(self._listeners):
                beat()
