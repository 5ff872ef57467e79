"""Heartbeats distinguish a busy engine from a hung one.

A request may wait for minutes in the queue of a busy engine, or be preempted. While calls are open,
the actor sends a no-op request to the engine core every `BEAT_S`. The core answers between two
steps; after each answer the actor sends a heartbeat on every open call. A core that hangs, or whose
workers hang, does not answer.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from configs.settings.router import BEAT_S

logger = logging.getLogger(__name__)


class HeartbeatMonitor:
    """Awaits `ask` every `every_s` while calls are open, and notifies them after each answer."""

    def __init__(self, ask: Callable[[], Awaitable[object]], every_s: float = BEAT_S) -> None:
        self._ask = ask
        self._every_s = every_s
        self._listeners: set[Callable[[], None]] = set()
        self._asking: asyncio.Task[None] | None = None

    @contextmanager
    def subscribed(self, beat: Callable[[], None]) -> Iterator[None]:
        """Call `beat` after each answer of the engine core, until the block ends."""
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
                # No further handling: the open calls report the failure of the engine.
                logger.warning("the engine core did not answer, so no heartbeat is sent: %r", error)
                continue
            for beat in tuple(self._listeners):
                beat()
