"""Threads for a tier's blocking calls, so that a hanging file system blocks no caller.

A lane has a few threads and a bounded queue. A call that has not started by its deadline fails when
a thread takes it; its owner may cancel it as long as it is queued. A call that runs past its
deadline *hangs* and keeps its thread. If the calls of all threads of a lane hang, the lane rejects
calls until one returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from connectors.errors import StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CallState(Enum):
    """State of a call: ``ENDED`` with a result, ``FAILED`` without one."""

    QUEUED = auto()
    RUNNING = auto()
    ENDED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class LaneCall(Generic[T]):
    """One call on a lane. A call that is ``over`` accesses no memory or file.

    ``function``  the blocking call
    ``deadline``  latest start, in ``time.monotonic()`` seconds; a call that runs past it hangs
    ``started``   whether a thread has called ``function``
    ``result``    result of ``function``, once ``state`` is ENDED
    ``seconds``   duration of the call without its time in the queue; 0 until it has ended
    ``ended_at``  end of the call, in ``time.monotonic()`` seconds; 0 until it has ended
    """

    function: Callable[[], T]
    deadline: float
    state: CallState = CallState.QUEUED
    started: bool = False
    result: T | None = None
    seconds: float = 0.0
    ended_at: float = 0.0

    @property
    def over(self) -> bool:
        """True once the call has ended or failed."""
        return self.state in (CallState.ENDED, CallState.FAILED)


@dataclass
class Lane:
    """A pool of ``threads`` threads with a queue of at most ``queue_calls`` calls."""

    name: str
    threads: int
    queue_calls: int
    _queue: deque[LaneCall[object]] = field(default_factory=deque)
    _calls: dict[int, LaneCall[object]] = field(default_factory=dict)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._condition = threading.Condition()
        for number in range(self.threads):
            # Daemon threads: one that hangs in a system call must not keep the process alive.
            threading.Thread(target=self._work, args=(number,), name=f"{self.name}-{number}", daemon=True).start()

    def submit(self, function: Callable[[], T], deadline: float) -> LaneCall[T] | None:
        """Queue a call. Return None if the lane is full, hangs or is closed."""
        call = LaneCall(function, deadline)
        with self._condition:
            if self._closed or len(self._queue) >= self.queue_calls or self._hangs(time.monotonic()):
                return None
            self._queue.append(call)  # type: ignore[arg-type]
            self._condition.notify()
        return call

    def cancel(self, call: LaneCall[Any]) -> None:
        """Remove a queued call and fail it. A call that has started is not affected."""
        with self._condition:
            if call not in self._queue:
                return
            self._queue.remove(call)
        call.state = CallState.FAILED

    @property
    def pending(self) -> int:
        """Number of queued and running calls."""
        with self._condition:
            return len(self._queue) + len(self._calls)

    @property
    def hangs(self) -> bool:
        """True if every thread runs a call past its deadline."""
        with self._condition:
            return self._hangs(time.monotonic())

    def close(self) -> None:
        """Fail all queued calls and reject new ones. Running calls go on."""
        with self._condition:
            self._closed = True
            left, self._queue = list(self._queue), deque()
            self._condition.notify_all()
        for call in left:
            call.state = CallState.FAILED

    def _hangs(self, now: float) -> bool:
        return len(self._calls) == self.threads and all(call.deadline < now for call in self._calls.values())

    def _work(self, number: int) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                call = self._queue.popleft()
                self._calls[number] = call
            state, started_at = CallState.FAILED, time.monotonic()
            try:
                if started_at < call.deadline:
                    call.state, call.started = CallState.RUNNING, True
                    call.result = call.function()
                    state = CallState.ENDED
            except StoreError as error:
                logger.debug("%s: %s", self.name, error)
            except Exception:
                logger.exception(
                    "Tandem: KV store, threads %s: a call failed with an unexpected error, and the engine continues "
                    "without its result; please report the error",
                    self.name,
                )
            call.ended_at = time.monotonic()
            call.seconds = call.ended_at - started_at
            with self._condition:
                del self._calls[number]
            call.state = state
