"""Threads for a tier's blocking calls, so that a hanging file system blocks no caller.

A call that runs past its deadline *hangs* and keeps its thread. If all threads of a lane hang, it
rejects calls until one returns. Queued calls end at their deadlines.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from connectors.errors import StoreError

logger = logging.getLogger(__name__)


class Call:
    """One call on a lane. A call that is ``over`` accesses no memory or file.

    ``deadline``     latest start, in ``time.monotonic()`` seconds; a call that runs past it hangs
    ``ok``           whether the call has returned ``result``
    ``seconds``      duration without the time in the queue, once the call is over
    ``progress_at``  time of its last ``progress``; before it starts, 0
    """

    def __init__(self, lane: Lane, function: Callable[[Call], Any], deadline: float, then: Callable[[Call], None]):
        self._lane = lane
        self.function = function
        self.deadline = deadline
        self.then = then
        self.started = self.ok = self.over = False
        self.result: Any = None
        self.seconds = self.ended_at = self.progress_at = 0.0

    def progress(self) -> None:
        self.progress_at = self._lane.progress_at = time.monotonic()

    @property
    def heard_at(self) -> float:
        """Time of the call's last progress or, while it is queued, of any call of the lane."""
        return self.progress_at or self._lane.progress_at


class Lane:
    """One thread calls ``submit``, ``cancel`` and ``sweep``."""

    def __init__(self, name: str, threads: int, queue_calls: int) -> None:
        self.progress_at = 0.0
        self._name = name
        self._threads = threads
        self._queue_calls = queue_calls
        self._queue: deque[Call] = deque()
        self._running: dict[int, Call] = {}
        self._over: deque[Call] = deque()
        self._unswept = 0
        self._closed = False
        self._condition = threading.Condition()
        for number in range(threads):
            # Daemon threads: one that hangs in a system call must not keep the process alive.
            threading.Thread(target=self._work, args=(number,), name=f"{name}-{number}", daemon=True).start()

    @property
    def accepts(self) -> bool:
        with self._condition:
            now = time.monotonic()
            hangs = len(self._running) == self._threads and all(call.deadline < now for call in self._running.values())
            return not (self._closed or hangs or len(self._queue) >= self._queue_calls)

    @property
    def idle(self) -> bool:
        return not self._unswept

    def submit(
        self, function: Callable[[Call], Any], deadline: float, then: Callable[[Call], None] = lambda call: None
    ) -> Call | None:
        """Queue a call, unless the lane does not accept it. ``sweep`` calls ``then`` at its end."""
        if not self.accepts:
            return None
        call = Call(self, function, deadline, then)
        self._unswept += 1
        with self._condition:
            self._queue.append(call)
            self._condition.notify()
        return call

    def cancel(self, call: Call) -> None:
        with self._condition:
            if call not in self._queue:
                return
            self._queue.remove(call)
        self._end(call)

    def sweep(self) -> None:
        """Fail queued calls past their deadlines, and call ``then`` of all calls that are over."""
        now = time.monotonic()
        with self._condition:
            late = [call for call in self._queue if call.deadline <= now]
        for call in late:
            self.cancel(call)
        while self._over:
            call = self._over.popleft()
            self._unswept -= 1
            call.then(call)

    def close(self) -> None:
        with self._condition:
            self._closed = True
            left, self._queue = self._queue, deque()
            self._condition.notify_all()
        for call in left:
            self._end(call)

    def _end(self, call: Call) -> None:
        call.over = True
        self._over.append(call)

    def _work(self, number: int) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                call = self._running[number] = self._queue.popleft()
            began_at = time.monotonic()
            try:
                if began_at < call.deadline:
                    # The lane's progress counted while the call was queued. 0 would mean queued.
                    call.progress_at, call.started = max(self.progress_at, sys.float_info.min), True
                    call.result = call.function(call)
                    call.ok = True
            except (StoreError, OSError) as error:
                logger.debug("%s: %s", self._name, error)
            except Exception:
                logger.exception(
                    "Tandem: KV store, threads %s: a call failed with an unexpected error, and the engine continues "
                    "without its result; please report the error",
                    self._name,
                )
            call.ended_at = time.monotonic()
            call.seconds = call.ended_at - began_at
            with self._condition:
                del self._running[number]
            self._end(call)
