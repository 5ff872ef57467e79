"""Two pairs of engines on one machine, one running at a time, under equal conditions.

An *arm* is a prefill and a decode engine with one connector. Requests alternate between the arms.
The idle arm is stopped (SIGSTOP), because NIXL's progress threads, which vLLM's connector starts,
spin when idle and would slow the other arm down. vLLM's connector also pins its worker to the last
core of the machine. Callers therefore unpin all threads of both arms before a measurement
(``free_cores``).
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


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


@dataclass
class Arm(Processes):
    """Engines with one connector, and the ids of all their processes."""

    name: str
    prefill: AsyncLLM
    decode: AsyncLLM

    def shutdown(self) -> None:
        self.wake()
        self.decode.shutdown()
        self.prefill.shutdown()


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
