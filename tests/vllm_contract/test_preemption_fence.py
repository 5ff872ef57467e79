"""A preemption's wait, and the locks that it holds meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from connectors.planning.layout import MemoryKind
from connectors.vllm_hma.orders import Chunk, Expect
from connectors.vllm_hma.worker_side import runtime
from tests.vllm_contract.test_ends import both_ends, let_go
from tests.vllm_contract.workers import DIGEST, LIMITS, Worker, receive, until


class Clock:
    """Clock of the test's thread; the progress thread uses the real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rests: list[float] = []
        self.during: Callable[[], None] = lambda: None
        self._ours, self._real, self._added = threading.get_ident(), runtime.time, 0.0
        fake = SimpleNamespace(monotonic=self._monotonic, sleep=self._sleep)
        monkeypatch.setattr(runtime, "time", fake)

    def _monotonic(self) -> float:
        added = self._added if threading.get_ident() == self._ours else 0.0
        return self._real.monotonic() + added

    def _sleep(self, seconds: float) -> None:
        """Pause of the fence: takes no time, and counts as a tenth of a second."""
        assert threading.get_ident() == self._ours
        self.rests.append(seconds)
        self._added += max(seconds, 0.1)
        self.during()


def test_preemption_on_an_accelerator_waits_for_nothing(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deliveries are aborted, so a wait for their writes has no use."""
    producer, _ = both_ends(worker, memory_kind=MemoryKind("VRAM", 0))
    clock = Clock(monkeypatch)
    producer.step(preempted=["q"])
    assert clock.rests == []
    let_go(producer)


def test_the_fence_does_not_hold_the_lock(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are answered and other transfers continue while the engine waits for a write."""
    producer, _ = both_ends(worker)
    clock, answered = Clock(monkeypatch), threading.Event()

    def ask() -> None:
        producer.runtime.counts()
        answered.set()

    def during() -> None:
        if len(clock.rests) == 1:
            threading.Thread(target=ask).start()
            assert answered.wait(30), "the lock is held while the fence rests"
            let_go(producer)

    clock.during = during
    producer.step(preempted=["q"])
    assert answered.is_set()


def test_one_hung_consumer_delays_one_preemption_only(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write in flight for longer than fence_s hangs: no later preemption waits for it."""
    producer, consumer = both_ends(worker)
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    producer.step(expects=[Expect("q2", "t2", 7, DIGEST)])
    producer.step(chunks=[Chunk("q2", ((3, 4),), 7)])
    until(lambda: producer.runtime.counts()["writes"] == 2)
    clock = Clock(monkeypatch)
    producer.step(preempted=["q"])
    assert 0 < len(clock.rests) <= LIMITS.fence_s / 0.1 + 1
    before = len(clock.rests)
    producer.step(preempted=["q2"])
    assert len(clock.rests) == before
    let_go(producer)
