"""Pass the items of a stream to the client without waking a task.

The callback that receives a frame from an engine writes to the client's connection. The request's
task sleeps until the stream ends, fails or exceeds a time limit.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

from actors.engine_pool.engine_call import EngineCall
from actors.errors import DeadlineError, SilentError
from actors.request import StreamChunk
from actors.router.splice import Splice

TICK_S = 0.25
"""Interval in seconds between checks of the time limits of all streams."""

USAGE = b'"usage":'

MOST_BYTES = 2**16
"""Size in bytes of joined events that are written at once."""


class ClientWriter(Protocol):
    """Connection of a client during a streamed answer."""

    on_resume: Callable[[], None] | None
    """Called when `paused` becomes false."""

    @property
    def paused(self) -> bool:
        """True while the client reads too slowly."""

    def write(self, data: bytes) -> None:
        """Send a part of the answer's body, or nothing after a disconnect. Check `paused` first."""


class StreamClock:
    """Timer that checks the time limits of all streams of a router while there are any."""

    def __init__(self) -> None:
        self._relays: set[Relay] = set()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, relay: "Relay") -> None:
        self._relays.add(relay)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def remove(self, relay: "Relay") -> None:
        self._relays.discard(relay)
        if not self._relays and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(TICK_S, self._tick)
        now = loop.time()
        for relay in list(self._relays):
            relay.check(now)


class Relay:
    """One engine call's part of a stream, on its way to the client.

    ``items``  items of the call that were already read
    """

    def __init__(
        self,
        call: EngineCall,
        items: deque[StreamChunk | bytes],
        splice: Splice,
        writer: ClientWriter,
        silence_s: float,
        idle_s: float,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.sent_bytes = 0
        self.usage = b""
        """Last events with a field `usage`, for the access log."""
        self.last = b""
        """Last events of the answer, which are not written: one write sends them and the end."""
        self._call = call
        self._items = items
        self._splice = splice
        self._writer = writer
        self._silence_s = silence_s
        self._idle_s = idle_s
        self._over: asyncio.Future[None] = loop.create_future()
        self._progressed = False
        """Whether an item has come since the last check."""
        self._heard_at = loop.time()
        self._ends_at = self._heard_at + idle_s
        self._paused_at: float | None = None

    async def run(self, clock: StreamClock) -> None:
        """Pass on the items until the answer or the call ends.

        Raises UnavailableError if the engine dies or sends nothing for `silence_s` (SilentError),
        DeadlineError if no data comes for `idle_s`, or the client takes none; the errors of the
        call and of `Splice.feed`. The client then has all data that came before.
        """
        self._writer.on_resume = self._call.reader = self._pump
        clock.add(self)
        try:
            self._pump()
            await self._over
        finally:
            clock.remove(self)
            self._writer.on_resume = self._call.reader = None

    def check(self, now: float) -> None:
        """End the stream if it exceeds a limit."""
        if self._writer.paused:
            self._paused_at = self._paused_at or now
            if now - self._paused_at >= self._idle_s:
                self._end(DeadlineError(f"the client read nothing of the stream for {self._idle_s:g} s"))
        if self._writer.paused or self._call.heard:
            self._heard_at = now
        if self._writer.paused or self._progressed:
            self._ends_at = now + self._idle_s
        self._call.heard = self._progressed = False
        if now >= self._ends_at:
            self._end(DeadlineError(f"the engine sent no data of the stream for {self._idle_s:g} s; try again"))
        elif now - self._heard_at >= self._silence_s:
            self._end(SilentError(f"the engine sent nothing for {self._silence_s:g} s; try again"))

    def _pump(self) -> None:
        """Pass on the items that have arrived, as far as the client takes them."""
        if self._writer.paused or self._over.done():
            return
        self._paused_at = None
        items, call, splice, ready = self._items, self._call, self._splice, b""
        try:
            try:
                while not splice.done and (items or call.has_items):
                    item = items.popleft() if items else call.pop()
                    ready += splice.feed(item)
                    self._progressed = True
                    if len(ready) >= MOST_BYTES:
                        self._write(ready)
                        ready = b""
                        if self._writer.paused:
                            return
            finally:
                if splice.done:
                    self.last = ready
                elif ready:
                    self._write(ready)
        except Exception as error:  # raised here, it would close the connection of all streams
            self._end(error)
        if splice.done or call.over:
            self._end(None if splice.done else call.error)

    def _write(self, events: bytes) -> None:
        self.sent_bytes += len(events)
        if USAGE in events:
            self.usage = events
        self._writer.write(events)

    def _end(self, error: Exception | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)
