"""Stop, continue and pin processes, so that what is compared runs under equal conditions.

vLLM's connector pins its worker to the last core of the machine. Callers therefore unpin all
threads before a measurement (``free_cores``).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import psutil


@dataclass
class Processes:
    """Processes that run or are stopped together."""

    pids: list[int]

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        self.wake()
        try:
            yield
        finally:
            self.sleep()

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def sleep(self) -> None:
        """Stop the processes until ``awake``."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def free_cores(pids: list[int]) -> None:
    """Undo any pinning: let all threads run on all cores of this process."""
    pin(pids, own_cores())


def own_cores() -> list[int]:
    """Return the cores that this process may use; a container or `taskset` may exclude some."""
    return sorted(os.sched_getaffinity(0))


def pin(pids: Iterable[int], cores: Iterable[int]) -> None:
    cores = tuple(cores)
    for pid in pids:
        for thread in psutil.Process(pid).threads():
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(thread.id, cores)


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set these variables for processes started in the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
