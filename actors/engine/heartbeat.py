"""Heartbeats distinguish a busy engine from a hung one.

A request may wait for minutes in the queue of a busy engine. While calls run, the actor sends a
no-op request to the engine core, which answers between two steps, and then a heartbeat on every
call without a complete response. A core that hangs does not answer: after `silence_timeout_s`,
routers stop waiting for this engine; after `transfer.step_s` and a margin the health check fails.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from configs.settings.router import BEAT_S

logger = logging.getLogger(__name__)

HUNG_MARGIN_S = 30.0
"""Seconds over `transfer.step_s` after which an engine core without an answer counts as hung.

With this margin, vLLM's own limit for a step ends the engine first and logs the cause. That limit,
`VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`, must not be above `transfer.step_s`.
"""


class HeartbeatMonitor:
    """Loop that awaits `ask` while calls run, and notifies the calls after each answer."""

    def __init__(self, ask: Callable[[], Awaitable[object]], every_s: float = BEAT_S) -> None:
        self._ask = ask
        self._every_s = every_s
        self._listeners: set[Callable[[], None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at: float | None = None

    @property
    def unanswered_s(self) -> float:
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    @contextmanager
    def subscribed(self, beat: Callable[[], None]) -> Iterator[None]:
        """Call `beat` after each answer of the engine core, until the block ends.

        An `ask` in progress continues after the last block ends: only its answer shows that the
        core does not hang.
        """
        self._listeners.add(beat)
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_while_open(), name="heartbeats")
        try:
            yield
        finally:
            self._listeners.discard(beat)
            if not self._listeners and self._asked_at is None:
                self.close()

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    async def _ask_while_open(self) -> None:
        while self._listeners:
            await asyncio.sleep(self._every_s)
            self._asked_at = time.monotonic()
            try:
                await self._ask()
            except Exception as error:
                # No further handling: the running calls report the failure of the engine.
                logger.warning("the engine core did not answer, so no heartbeat is sent: %r", error)
                continue
            finally:
                self._asked_at = None
            for beat in tuple(self._listeners):
                beat()
        self._asking = None
