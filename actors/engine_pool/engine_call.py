"""A router's call to an engine: its items, timeouts and timestamps."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from actors.engine_pool.slots import Slot, SlotPool
from actors.errors import (
    CannotResumeError,
    DeadlineError,
    EngineDownError,
    EngineError,
    RefusedError,
    SilentError,
    UnavailableError,
)
from actors.request import (
    Accepted,
    EngineTimings,
    FirstTokenChunk,
    Heartbeat,
    Item,
    Moved,
    PrefillReport,
    ResponseStart,
    StreamChunk,
    TokenChunk,
)
from actors.rpc.client import Channel
from actors.rpc.messages import RpcFailure, RpcRequest
from actors.rpc.protocol import GRANT_BYTES, item_bytes
from actors.telemetry.latency_breakdown import CallTimes
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

Response = tuple[ResponseStart, list[StreamChunk | bytes]]
"""Start of a response and its items: those of a stream so far, else the whole body."""


class Watcher(Protocol):
    """Receiver of what a call reports besides its answer, at once."""

    def reported(self, report: PrefillReport) -> None:
        """Receive a report about prefill."""

    def sampled(self) -> None:
        """Learn that the engine has sampled the first token, so it has the KV of the prompt."""


class EngineCall:
    """A running call. `next` returns its items; read them to the end or cancel the call."""

    def __init__(self, role: str, slot: Slot, slots: SlotPool, watcher: Watcher | None = None) -> None:
        self.sent_at = time.monotonic()
        """Monotonic time just before `send`; a time after it would make the call appear shorter."""
        self._role = role
        self._slot = slot
        self._slots = slots
        self._watcher = watcher
        self.reader: Callable[[], None] | None = None
        """Called after items or the end have arrived; None: they wake `next`. `Answer` sets it."""
        self.heard = False
        """True if anything has arrived since the reader reset this, also a heartbeat."""
        self.over = False
        """True after the end of the call; items may still be queued."""
        self.error: TandemError | None = None
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._silence: asyncio.Timeout | None = None
        """Timeout of the wait for the next item; each item or heartbeat extends it."""
        self._silence_s: float | None = None
        self._channel: Channel | None = None
        self._stream = 0
        self._consumed_bytes = 0
        self._has_token = False
        self._answered_at: float | None = None
        self._timings: EngineTimings | None = None

    def send(self, channel: Channel, request: RpcRequest) -> None:
        self._channel = channel
        self._stream = channel.call(request, self)

    @property
    def times(self) -> CallTimes:
        """Send time, answer time (now, if there is none yet) and the engine's timings, if any."""
        answered_at = time.monotonic() if self._answered_at is None else self._answered_at
        return CallTimes(self.sent_at, answered_at, self._timings)

    def received(self, item: Item) -> Callable[[], None] | None:
        """Queue an item of the answer, and handle others; credit limits the size of the queue.

        Returns `flush` for the first queued item: one call passes on all items of a frame.
        """
        self.heard = True
        match item:
            case bytes() | ResponseStart() | FirstTokenChunk() | Moved():
                pass
            case TokenChunk():
                if not self._has_token:
                    self._first_token()
            case _:
                self._handle(item)
                return None
        self._items.append(item)
        return self.flush if len(self._items) == 1 else None

    def flush(self) -> None:
        if self.reader is not None:
            self.reader()
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def has_items(self) -> bool:
        return bool(self._items)

    def pop(self) -> Any:
        item = self._items.popleft()
        self._consume(item)
        return item

    def _handle(self, item: Item) -> None:
        match item:
            case Accepted(ongoing=ongoing):
                self._slots.record(self._slot, "accepted", ongoing)
            case PrefillReport():
                try:
                    if self._watcher is not None:
                        self._watcher.reported(item)
                except Exception:  # would close the connection, with the calls of others
                    logger.exception("cannot apply a report about prefill; ignoring it: %r", item)
            case Heartbeat(tokens=True) if not self._has_token:
                self._first_token()
        self._consume(item)
        if self._silence is not None and self._silence_s is not None and not self._silence.expired():
            self._silence.reschedule(asyncio.get_running_loop().time() + self._silence_s)

    def ended(self, lost: str | None, failure: RpcFailure | None = None) -> None:
        """End the call; `lost` or `failure` is the reason if its answer is incomplete."""
        self._channel = None
        self.over = True
        if lost is not None:
            self.error = self._unavailable(lost)
        elif failure is not None:
            self.error = self._error_of(failure)
        self.flush()

    def cancel(self) -> None:
        """Cancel the call, here and in the engine, unless it has ended; the engine aborts it."""
        if self._channel is not None:
            self._channel.cancel(self._stream)
        if not self.over:
            self.ended("the call was cancelled")

    async def next(self, silence_s: float | None = None, until: float | None = None) -> Any:
        """Return the next item of the answer, or None at the end of the call.

        Raises UnavailableError if the engine has died or its connection is lost, SilentError if it
        sends nothing for `silence_s`, not even a heartbeat, DeadlineError at time `until` of the
        event loop's clock. Raises RefusedError if the engine refuses the call, CannotResumeError if
        it cannot continue the replay log, EngineError after another error in the engine's actor.
        """
        while not self._items:
            if self.over:
                if self.error is not None:
                    raise self.error
                return None
            loop, silence = asyncio.get_running_loop(), asyncio.timeout(silence_s)
            self._waiter, self._silence_s = loop.create_future(), silence_s
            try:
                async with asyncio.timeout_at(until), silence:
                    self._silence = silence
                    await self._waiter
            except TimeoutError:
                if self._items or self.over:
                    continue  # they arrived as the timer expired
                # An engine is not at fault if the deadline has come, too. uvloop's timers are up to
                # 1 ms early.
                if silence.expired() and (until is None or loop.time() + 0.001 < until):
                    raise SilentError(f"the {self._role} engine sent nothing for {silence_s:g} s; try again") from None
                problem = "sent no further data before the request's deadline"
                raise DeadlineError(f"the {self._role} engine {problem}; try again") from None
            finally:
                self._waiter = self._silence = None
        return self.pop()

    async def open(self, silence_s: float | None = None, to_first_token: bool = False) -> Response:
        """Return the response with the first bytes of a stream, or with the whole body.

        A body is whole at its Content-Length: the call may end later.

        Some streams start with events before the first token. With `to_first_token`, wait for the
        first chunk with a token, or for the end of the answer. Also raises UnavailableError if the
        call ends without a response.
        """
        start = await self.start(silence_s)
        items: list[StreamChunk | bytes] = []
        length = None if start.streams else next((v for name, v in start.headers if name == b"content-length"), None)
        left_bytes = -1 if length is None else int(length)
        while left_bytes and (item := await self.next(silence_s)) is not None:
            items.append(item)
            if start.streams and (isinstance(item, StreamChunk) or not to_first_token):
                break
            left_bytes -= len(item.body if isinstance(item, StreamChunk) else item)
        self._answered(items[-1].timings if items and isinstance(items[-1], StreamChunk) else None)
        return start, items

    async def start(self, silence_s: float | None = None) -> ResponseStart:
        """Return the response's status and headers; raises the errors of `open`."""
        item = await self.next(silence_s)
        if not isinstance(item, ResponseStart):
            raise UnavailableError(f"the {self._role} engine ended a request without a response; try again")
        self._answered(item.timings)
        return item

    def _answered(self, timings: EngineTimings | None) -> None:
        self._answered_at = time.monotonic()
        self._timings = timings or self._timings

    def _first_token(self) -> None:
        self._has_token = True
        try:
            if self._watcher is not None:
                self._watcher.sampled()
        except Exception:  # would close the connection, with the calls of others
            logger.exception("cannot record the first token of a request")

    def _consume(self, item: Item) -> None:
        self._consumed_bytes += item_bytes(item)
        if self._consumed_bytes >= GRANT_BYTES and self._channel is not None:
            self._channel.grant(self._stream, self._consumed_bytes)
            self._consumed_bytes = 0

    def _unavailable(self, why: str) -> UnavailableError:
        error = UnavailableError(f"the {self._role} engine is not available; try again")
        error.__cause__ = EngineDownError(f"{self._slot.replica_id}: {why}")
        return error

    def _error_of(self, failure: RpcFailure) -> TandemError:
        match failure.kind:
            case "full" | "leaving":
                self._slots.record(self._slot, failure.kind)
                return RefusedError(failure.message)
            case "engine_down":
                return self._unavailable(failure.message)
            case "cannot_resume":
                return CannotResumeError(failure.message)
            case _:
                return EngineError(failure.message)
