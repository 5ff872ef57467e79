"""A worker ends transfers when the scheduler, the transport or the peer ends a part first, and
blocks that a step overwrites meanwhile.

vLLM's second model runner queues kernels that zero and copy blocks before it calls the connector
(vllm/v1/worker/gpu/model_runner.py: ``update_requests``, then ``pre_forward``). vLLM zeroes the new
blocks of hybrid and mixed-precision caches, except those that a connector loads
(``KVCacheConfig.needs_kv_cache_zeroing``, ``get_loaded_kv_cache_group_ids``).
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from connectors.codec import decode
from connectors.errors import FailedWriteError
from connectors.planning.layout import MemoryKind
from connectors.protocol.wire import Alive, Cancel, Peer
from connectors.vllm_hma.config import parse_config
from connectors.vllm_hma.handshake import probe
from connectors.vllm_hma.handshake.processes import Liveness
from connectors.vllm_hma.kv_store.worker import StoreWorker
from connectors.vllm_hma.orders import Chunk, Finished, Orders
from connectors.vllm_hma.reports import Kept, WorkerReport
from connectors.vllm_hma.worker_side import runtime
from connectors.vllm_hma.worker_side import worker as worker_side
from testing.connector_state import snapshot
from tests.campaigns.schedules import scheduling
from tests.campaigns.schedules.scheduling import BLOCK_TOKENS, STOP_TOKEN, WINDOW_TOKENS, Engine
from tests.vllm_contract.caches import cache_config, full, sliding, views, vllm_config
from tests.vllm_contract.scheduler_sides import CONSUME
from tests.vllm_contract.workers import (
    ARRIVED,
    EXPECT,
    FAILED,
    LIMITS,
    NOTHING,
    SENT,
    SHORT,
    WHOLE,
    Clock,
    Scripted,
    SlowFence,
    Worker,
    both_ends,
    compute,
    let_go,
    live,
    posted,
    receive,
    results,
    scripted,
    taken,
    until,
)

Make = Callable[..., Worker]
KEPT, VRAM = Kept("r", "t"), MemoryKind("VRAM", 0)
STEP = dataclasses.replace(SHORT, step_s=1.0)


def count(worker: Worker, kind: type) -> list[int]:
    sent, notify = [0], worker.transport.notify

    def counted(peer: str, payload: bytes) -> None:
        notify(peer, payload)
        sent[0] += isinstance(decode(payload).message, kind)

    worker.transport.notify = counted  # type: ignore[method-assign]
    return sent


def fail_the_write(producer: Worker) -> None:
    scripted(producer).errors["poll", 0] = partial(FailedWriteError, "c/0", "parts may arrive")
    let_go(producer)


@pytest.mark.parametrize("fails", [False, True], ids=["silent", "its write has failed"])
def test_only_a_supervisor_ends_the_quarantine_of_a_lost_engine(impatient: Make, fails: bool) -> None:
    """Neither answers Cancel, however often it is sent. A report of another host has no effect."""
    producer, consumer = both_ends(impatient)
    if fails:
        fail_the_write(producer)
    assert results(consumer) == FAILED
    assert consumer.runtime.report() == WorkerReport(begun=[KEPT])
    cancels = count(consumer, Cancel)
    until(lambda: cancels[0] >= 3)
    consumer.step(lost=["another host."])
    assert consumer.runtime.report() is None
    consumer.step(lost=["another host.", "p"])
    assert consumer.runtime.report() == WorkerReport(ended=[KEPT])
    assert consumer.runtime.counts()["quarantined"] == 0


@pytest.mark.parametrize("ended", ["p", "c"])
def test_the_end_of_a_peers_process_ends_what_waits_for_it(
    impatient: Make, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    """Decode's quarantine, also if prefill's engine core ended before, and prefill's memory of a
    failed write. No report is needed: both workers run on one host.
    """
    monkeypatch.setattr(probe, "CONFIRM_S", 0.01)
    producer, consumer = both_ends(impatient)
    if ended == "p":
        producer.server.close()
    else:
        fail_the_write(producer)
    assert results(consumer) == FAILED
    waiting = (consumer if ended == "p" else producer).runtime

    def waits_for() -> tuple[set[Peer], int]:
        found = snapshot(waiting)
        return set(found.probed), len(found.consumer.quarantined) + sum(map(len, found.producer.failed.values()))

    until(lambda: waits_for() == ({Peer(ended, 0)}, 1))
    monkeypatch.setattr(probe, "liveness", lambda _: Liveness.GONE)
    until(lambda: waits_for() == (set(), 0))


def test_an_engine_that_hangs_keeps_no_consumer_waiting(worker: Make) -> None:
    """The progress thread answers: decode computes the prompt, and its blocks are freed at once."""
    # Longer than a pause of the machine, which would also end the wait.
    patient = dataclasses.replace(SHORT, progress_s=4.0)
    producer, consumer = worker("p", limits=STEP), worker("c", limits=patient)
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    producer.step(chunks=[Chunk("q", ((1,),), 4)])
    assert results(consumer) == FAILED
    assert KEPT not in (consumer.runtime.report() or WorkerReport()).begun


def test_an_engine_that_steps_keeps_its_consumers(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the request waits, other requests' steps keep the heartbeat."""
    now = [time.monotonic()]
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    producer, consumer = worker("p", limits=STEP), worker("c", limits=SHORT)
    live(producer, consumer)
    alive = count(producer, Alive)
    for turn in range(30):  # more than six seconds on the clock of both workers
        producer.step()
        # More than alive_s: a sum of floats may round to slightly less.
        now[0] += 1.1 * STEP.alive_s
        until(lambda turn=turn: alive[0] > turn)  # type: ignore[misc]
        assert taken(consumer) == NOTHING
    producer.step(chunks=[WHOLE])
    assert results(consumer) == ARRIVED


# ---- preemptions -------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["DRAM", "VRAM"])
@pytest.mark.parametrize("late_orders", [True, False], ids=["V2", "V1"])
def test_preemption_with_late_orders_waits_for_nothing(
    worker: Make, monkeypatch: pytest.MonkeyPatch, memory: str, late_orders: bool
) -> None:
    """vLLM has queued the overwriting kernels before the call, so even a successful write may have
    read their output. Otherwise, a write that ends within fence_s is complete.
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


def test_the_fence_does_not_hold_the_lock(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_one_hung_consumer_delays_one_preemption_only(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write in flight for longer than fence_s may read foreign bytes: its consumer receives
    Aborted after it, and no later preemption waits for it.
    """
    producer, consumer = both_ends(worker)
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    compute(producer, "2")
    until(lambda: producer.runtime.counts()["writes"] == 2 and posted(producer))
    clock = Clock(monkeypatch)
    producer.step(preempted=["q"])
    assert 0 < (before := len(clock.rests)) <= LIMITS.fence_s / 0.1 + 1
    producer.step(preempted=["q2"])
    assert len(clock.rests) == before
    let_go(producer)
    found: set[str] = set()
    while found != {"r", "r2"}:
        found |= results(consumer)[2]


@pytest.mark.parametrize(
    ("computed_tokens", "preempted"), [(4, True), (7, True), (7, False)], ids=["a chunk", "the prompt", "cancelled"]
)
def test_blocks_overwritten_before_the_report(worker: Make, computed_tokens: int, preempted: bool) -> None:
    """The scheduler has taken the blocks from request q, and the accelerator has overwritten them,
    before the worker knows. The digest matches them too, so only an abort prevents their use.
    """
    fence = SlowFence()
    producer, consumer = worker("p", memory_kind=VRAM, fence=fence, transport_class=Scripted), worker("c")
    live(producer, consumer)
    consumer.cache[:] = 255
    producer.step(chunks=[Chunk("q", ((1, 2)[: -(-computed_tokens // 4)],), computed_tokens)])
    producer.cache[[1, 2]] = 0
    fence.done.update(fence.marked)
    until(lambda: consumer.cache[3, 0] == 0 and producer.runtime.counts()["writes"] == 0)
    if preempted:
        producer.step(preempted=["q"])
        producer.step(chunks=[Chunk("q", ((4, 5),), 7)])
        fence.done.update(fence.marked)
    producer.step(finished=[Finished("q", preempted, "the prefill request was cancelled")])
    assert results(consumer) == FAILED


@pytest.mark.parametrize("later", [{}, {"finished": [SENT]}], ids=["a step", "its end"])
def test_the_next_step_completes_a_delivery_on_an_accelerator(worker: Make, later: dict[str, list[Finished]]) -> None:
    """Fin follows when a step has begun, or the request has ended, without a preemption."""
    producer, consumer = worker("p", memory_kind=VRAM, transport_class=Scripted), worker("c")
    consumer.step(receives=[receive(producer.address)])
    compute(producer)
    until(lambda: consumer.cache[5, 0] == 3 and producer.runtime.counts()["writes"] == 0)
    assert taken(consumer) == NOTHING
    producer.step(**later)
    assert results(consumer) == ARRIVED


# ---- decode's blocks, which vLLM zeroes or a store still copies ---------------------------------

PROMPT = list(range(10, 110))


def mixed(blocks: int) -> KVCacheConfig:
    """Full attention in float32 and windows in bfloat16, which vLLM zeroes."""
    windows = sliding(block_size=BLOCK_TOKENS, sliding_window=WINDOW_TOKENS, dtype=torch.bfloat16)
    layers = [[f"model.layers.{number}.self_attn.attn"] for number in range(3)]
    cache = cache_config((layers[0], full(block_size=BLOCK_TOKENS)), (layers[1], windows), (layers[2], windows))
    cache.num_blocks = blocks
    assert cache.needs_kv_cache_zeroing
    return cache


def test_vllm_zeroes_the_blocks_that_a_transfer_fills_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """They must not keep stale bytes that are NaN in their dtype: the last block of full attention,
    and the first and last of each window; no block that the prefix cache shares, and none that the
    transfer fills.
    """
    monkeypatch.setattr(scheduling, "kv_cache", mixed)
    engine = Engine(0, 60, prefix_caching=True, asynchronous=False)

    def step() -> SchedulerOutput:
        engine.steps += 1
        output = engine.scheduler.schedule()
        engine.scheduler.update_from_output(output, engine.execute(output))
        return output

    def add(name: str, prompt: list[int], params: dict[str, object] | None) -> None:
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        sampling.stop_token_ids = [STOP_TOKEN]
        engine.scheduler.add_request(Request(name, prompt, sampling, None, block_hasher=engine.hasher))

    try:
        add("earlier", PROMPT[:40], None)
        while engine.scheduler.requests:
            step()
        engine.later = lambda most=40: engine.steps + 3  # type: ignore[method-assign]
        add("r", PROMPT, CONSUME)
        output = step()
    finally:
        engine.close()
    (order,) = output.kv_connector_metadata.receives
    # 32 tokens are cached; 67 arrive, up to token 99, whose window starts with token 52.
    assert (order.start_token, order.end_token) == (32, 99)
    everything, *windows = order.tables
    zeroed = {*(output.new_block_ids_to_zero or ())}
    assert zeroed.isdisjoint({*everything[:2], *everything[3:6]})
    assert {everything[6], *(window[at] for window in windows for at in (3, 6))} <= zeroed


@pytest.fixture
def accelerated(worker: Make) -> tuple[Worker, SlowFence]:
    fence = SlowFence()
    return worker("c", memory_kind=VRAM, integrity="off", fence=fence, zeroes_blocks=True), fence


def receptions(consumer: Worker) -> dict[str, str]:
    return dict(snapshot(consumer.runtime).consumer.receptions)


def test_the_order_waits_for_the_kernels_that_zero(worker: Make, accelerated: tuple[Worker, SlowFence]) -> None:
    """On an accelerator, kernels are queued: no byte of the transfer may arrive before they run."""
    producer, (consumer, fence) = worker("p", integrity="off"), accelerated
    consumer.step(receives=[receive(producer.address)])
    assert receptions(consumer) == {}
    fence.done.update(fence.marked)
    compute(producer)
    assert results(consumer) == ARRIVED


def test_the_order_waits_for_the_copies_of_a_store(worker: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may read or write blocks that vLLM has freed and gives to the request."""
    fence, end = SlowFence(), torch.cpu.Event()
    monkeypatch.setattr(end, "query", lambda: False, raising=False)
    producer, consumer = worker("p", integrity="off"), worker("c", memory_kind=VRAM, integrity="off", fence=fence)
    connector = worker_side.WorkerConnector(parse_config({}), "c", vllm_config(), cache_config((["f"], full())))
    connector._runtime = consumer.runtime  # noqa: SLF001
    monkeypatch.setattr(StoreWorker, "_touched", (end,))
    connector.after_forward(Orders(receives=[receive(producer.address)]))
    assert receptions(consumer) == {}
    fence.done.add(end)
    until(lambda: receptions(consumer) == {"r": "offered"})
    assert fence.marked == []


@pytest.mark.parametrize("lost", [False, True], ids=["aborted", "its engine is lost"])
def test_a_request_that_ends_before_the_kernels_have_run(
    worker: Make, accelerated: tuple[Worker, SlowFence], lost: bool
) -> None:
    """The request has offered no blocks: vLLM frees them, and prefill does not await its lease. A
    supervisor reports a lost engine once: later, only a failed handshake would end the wait.
    """
    producer, other, (consumer, fence) = worker("p", integrity="off"), worker("o", integrity="off"), accelerated
    consumer.step(receives=[receive(producer.address), receive(other.address, "s", "u")])
    consumer.step(**({"lost": ["p"]} if lost else {"aborts": ["r"]}))
    assert taken(consumer) == FAILED
    if not lost:
        compute(producer)
        producer.step(finished=[SENT])
        assert results(producer) == ({"q"}, set(), set())
    fence.done.update(fence.marked)
    until(lambda: receptions(consumer) == {"s": "offered"})
