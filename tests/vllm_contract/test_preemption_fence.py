"""A preemption's wait, the locks that it holds meanwhile, and blocks overwritten before it.

vLLM's second model runner queues kernels that zero and copy blocks before it calls the connector
(vllm/v1/worker/gpu/model_runner.py: ``update_requests``, then ``pre_forward``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from connectors.planning.layout import MemoryKind
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.orders import Chunk, Finished
from connectors.vllm_hma.worker_side import runtime
from connectors.vllm_hma.worker_side import worker as worker_side
from tests.vllm_contract.caches import cache_config, full, views, vllm_config
from tests.vllm_contract.test_ends import both_ends, let_go
from tests.vllm_contract.test_streaming import SlowFence
from tests.vllm_contract.workers import (
    ARRIVED,
    EXPECT,
    FAILED,
    LIMITS,
    NOTHING,
    SENT,
    Scripted,
    Worker,
    compute,
    posted,
    receive,
    results,
    until,
)


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


@pytest.mark.parametrize("memory", ["DRAM", "VRAM"])
@pytest.mark.parametrize("late_orders", [True, False], ids=["V2", "V1"])
def test_preemption_with_late_orders_waits_for_nothing(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, memory: str, late_orders: bool
) -> None:
    """vLLM has queued the overwriting kernels before the call, so even a successful write may have
    read their output: the deliveries are aborted, on any memory. Otherwise, a write that ends
    within fence_s is complete, and the transfer continues.
    """
    producer, consumer = both_ends(worker, memory_kind=MemoryKind(memory, 0), late_orders=late_orders)
    producer.cache[[3, 4]] = 0
    clock = Clock(monkeypatch)
    clock.during = lambda: let_go(producer)
    producer.step(preempted=["q"])
    let_go(producer)
    producer.step(chunks=[Chunk("q", ((3, 4),), 7)])
    assert (clock.rests == []) == late_orders
    assert results(consumer) == (FAILED if late_orders else ARRIVED)
    assert late_orders or consumer.cache[[3, 5], 0].tolist() == [2, 3], "the write was complete"


@pytest.mark.parametrize("v2", [True, False])
def test_the_model_runner_decides_whether_orders_are_late(monkeypatch: pytest.MonkeyPatch, v2: bool) -> None:
    """vLLM's V2 runner also exists for CPUs, and its V1 runner for GPUs."""
    monkeypatch.setattr(worker_side, "get_tensor_model_parallel_rank", lambda: 0)
    cache = cache_config((["model.layers.0.self_attn.attn"], full()))
    connector = worker_side.WorkerConnector(parse_config({}), "p", vllm_config(), cache)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(v2)))  # vLLM refuses True here without Triton
    connector.register(views(cache))
    try:
        assert connector.runtime._late_orders == v2  # noqa: SLF001
    finally:
        connector.close()


def test_the_fence_does_not_hold_the_lock(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are answered and other transfers continue while the engine waits for a write."""
    producer, _ = both_ends(worker)
    clock, answered = Clock(monkeypatch), threading.Event()

    def ask() -> None:
        producer.runtime.counts()
        answered.set()

    def during() -> None:
        if len(clock.rests) == 1:
            threading.Thread(target=ask, daemon=True).start()
            assert answered.wait(30), "the lock is held while the fence pauses"
            let_go(producer)

    clock.during = during
    producer.step(preempted=["q"])
    assert answered.is_set()


def test_one_hung_consumer_delays_one_preemption_only(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write in flight for longer than fence_s hangs and may read foreign bytes: its consumer
    receives Aborted after it, and no later preemption waits for it.
    """
    producer, consumer = both_ends(worker)
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    compute(producer, "2")
    until(lambda: producer.runtime.counts()["writes"] == 2 and posted(producer))
    clock = Clock(monkeypatch)
    producer.step(preempted=["q"])
    assert 0 < len(clock.rests) <= LIMITS.fence_s / 0.1 + 1
    before = len(clock.rests)
    producer.step(preempted=["q2"])
    assert len(clock.rests) == before
    let_go(producer)
    found: set[str] = set()
    while found != {"r", "r2"}:
        found |= results(consumer)[2]


def overwritten_before_the_report(
    worker: Callable[..., Worker], fence: SlowFence, computed_tokens: int
) -> tuple[Worker, Worker]:
    """A producer on an accelerator that has written blocks after the next step overwrote them.

    The scheduler has taken the blocks from request q, and the worker does not know it yet.
    """
    producer = worker("p", memory_kind=MemoryKind("VRAM", 0), fence=fence, transport_class=Scripted)
    consumer = worker("c")
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    until(lambda: consumer.runtime.counts()["offered"] == 1)
    consumer.cache[:] = 255
    producer.step(chunks=[Chunk("q", ((1, 2)[: -(-computed_tokens // 4)],), computed_tokens)])
    producer.cache[[1, 2]] = 0
    fence.done.update(fence.marked)
    until(lambda: consumer.cache[3, 0] == 0 and producer.runtime.counts()["writes"] == 0)
    return producer, consumer


@pytest.mark.parametrize(
    ("computed_tokens", "preempted"), [(4, True), (7, True), (7, False)], ids=["a chunk", "the prompt", "cancelled"]
)
def test_blocks_overwritten_before_the_report(
    worker: Callable[..., Worker], computed_tokens: int, preempted: bool
) -> None:
    """The digest matches overwritten blocks too, so only an abort prevents their use."""
    fence = SlowFence()
    producer, consumer = overwritten_before_the_report(worker, fence, computed_tokens)
    if preempted:
        producer.step(preempted=["q"])
        producer.step(chunks=[Chunk("q", ((4, 5),), 7)])
        fence.done.update(fence.marked)
    producer.step(finished=[Finished("q", preempted, "the prefill request was cancelled")])
    assert results(consumer) == FAILED


@pytest.mark.parametrize("later", [{}, {"finished": [SENT]}], ids=["a step", "its end"])
def test_the_next_step_completes_a_delivery_on_an_accelerator(
    worker: Callable[..., Worker], later: dict[str, list[Finished]]
) -> None:
    """Fin follows when a step has begun, or the request has ended, without a preemption."""
    producer, consumer = worker("p", memory_kind=MemoryKind("VRAM", 0), transport_class=Scripted), worker("c")
    consumer.step(receives=[receive(producer.address)])
    compute(producer)
    until(lambda: consumer.cache[5, 0] == 3 and producer.runtime.counts()["writes"] == 0)
    assert consumer.runtime.results() == NOTHING
    producer.step(**later)
    assert results(consumer) == ARRIVED
