"""Threads for a tier's blocking calls, so that a hanging file system delays its caller by a deadline at most.

A lane has a few threads and a bounded queue. A call that has not begun by its deadline never begins. One that hangs
keeps its thread: when all threads of a lane hang, the lane refuses calls at once until one of them returns.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from connectors.errors import StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CallState(Enum):
    """``ENDED`` with a result, or ``FAILED``: no result will come."""

    QUEUED = auto()
    RUNNING = auto()
    ENDED = auto()
    FAILED = auto()


@dataclass(slots=True)
class Call(Generic[T]):
    """One call on a lane. ``result`` is set when it ends. A call that is ``over`` accesses no memory or file."""

    function: Callable[[], T]
    deadline: float
    state: CallState = CallState.QUEUED
    result: T | None = None
    seconds: float = 0.0

    @property
    def over(self) -> bool:
        return self.state in (CallState.ENDED, CallState.FAILED)


@dataclass
class Lane:
    """``threads`` calls at a time, ``queue_calls`` waiting."""

    name: str
    threads: int
    queue_calls: int
    _queue: deque[Call[object]] = field(default_factory=deque)
    _calls: dict[int, Call[object]] = field(default_factory=dict)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._condition = threading.Condition()
        for number in range(self.threads):
            # Daemons: a thread that hangs in a system call must not keep the process from ending.
            threading.Thread(target=self._work, args=(number,), name=f"{self.name}-{number}", daemon=True).start()

    def submit(self, function: Callable[[], T], deadline: float) -> Call[T] | None:
        """Queue a call. None where the lane is full, hangs or is closed."""
        call = Call(function, deadline)
        with self._condition:
            if self._closed or len(self._queue) >= self.queue_calls or self._hangs(time.monotonic()):
                return None
            self._queue.append(call)  # type: ignore[arg-type]
            self._condition.notify()
        return call

    @property
    def pending(self) -> int:
        """Calls that have not ended."""
        with self._condition:
            return len(self._queue) + len(self._calls)

    @property
    def hangs(self) -> bool:
        """Whether every thread is in a call that is past its deadline."""
        with self._condition:
            return self._hangs(time.monotonic())

    def close(self) -> None:
        """Start no further calls; queued ones fail."""
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
                    call.state = CallState.RUNNING
                    call.result = call.function()
                    state = CallState.ENDED
            except StoreError as error:
                logger.debug("%s: %s", self.name, error)
            except Exception:
                logger.exception("%s: a call failed in a way that was not foreseen", self.name)
            call.seconds = time.monotonic() - started_at
            with self._condition:
                del self._calls[number]
            call.state = state
