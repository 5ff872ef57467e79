"""Writes are posted in slices by the progress thread, without the worker's lock, and each ends
alone, whatever error the transport raises.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from connectors.errors import FailedWriteError, TransportError
from connectors.planning.layout import MemoryKind
from connectors.vllm_hma.reports import Kept, QuarantineReport, WorkerReport
from connectors.vllm_hma.worker_side import runtime, writes
from testing.connector_state import snapshot
from tests.vllm_contract.test_preemption_fence import Clock
from tests.vllm_contract.workers import (
    ARRIVED,
    EXPECT,
    FAILED,
    NOTHING,
    SENT,
    WHOLE,
    Scripted,
    Worker,
    compute,
    posted,
    receive,
    results,
    scripted,
    transfer,
    until,
)


@pytest.fixture
def pair(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> tuple[Worker, Worker, Scripted]:
    """A producer that posts one block a slice, a consumer that has sent its offer, and the
    producer's transport.
    """
    monkeypatch.setattr(writes, "SLICE_RUNS", 1)
    producer, consumer = worker("p", transport_class=Scripted), worker("c")
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    return producer, consumer, scripted(producer)


def posting(producer: Worker, number: int) -> None:
    """Compute the prompt; return when the post of slice ``number`` has begun and does not end."""
    transport = scripted(producer)
    transport.slow = number
    producer.step(chunks=[WHOLE])
    assert transport.posting.wait(10.0)


def no_result(producer: Worker, consumer: Worker) -> None:
    for _ in range(3):
        producer.step()
        assert consumer.runtime.results() == NOTHING


def test_a_post_delays_no_step_and_no_message(pair: tuple[Worker, Worker, Scripted]) -> None:
    """The engine's thread neither posts nor waits for a post, and peers are answered meanwhile."""
    producer, consumer, transport = pair
    posting(producer, 0)
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    until(lambda: consumer.runtime.counts()["offered"] == 2)
    producer.step(expects=[EXPECT])
    until(lambda: len(snapshot(producer.runtime).producer.offers) == 2)
    assert not transport.overdue, "a step or a message waited for the post"
    transport.gate.set()
    assert results(consumer) == ARRIVED
    assert transport.posts == 2
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]


def test_fin_follows_the_last_slice(pair: tuple[Worker, Worker, Scripted]) -> None:
    """The first slice has ended, the second is being posted: the consumer has no result."""
    producer, consumer, transport = pair
    posting(producer, 1)
    no_result(producer, consumer)
    assert producer.runtime.counts()["writes"] == 1
    transport.gate.set()
    assert results(consumer) == ARRIVED


def test_an_abort_stops_the_slices(pair: tuple[Worker, Worker, Scripted]) -> None:
    """The consumer's blocks stay allocated until the slice that is being posted has ended."""
    producer, consumer, transport = pair
    posting(producer, 0)
    transport.held = True
    consumer.step(aborts=["r"])

    def given_up() -> bool:
        producer.step()
        return not producer.runtime._producer.wants(1)  # noqa: SLF001

    until(given_up)
    transport.gate.set()
    until(lambda: bool(transport._pending))  # noqa: SLF001 (the slice is in flight)
    no_result(producer, consumer)
    transport.held = False
    assert results(consumer) == FAILED
    assert consumer.runtime.report() is None
    assert (transport.posts, consumer.cache[[3, 5], 0].tolist()) == (1, [2, 0])


@pytest.mark.parametrize("number", [0, 1], ids=["first slice", "last slice"])
@pytest.mark.parametrize(
    ("call", "error", "kept"),
    [
        ("write", partial(TransportError, "c/0", "-"), False),
        ("write", partial(FailedWriteError, "c/0", "-"), True),
        ("write", partial(RuntimeError, "anything"), True),
        ("poll", partial(TransportError, "c/0", "-"), True),
        ("poll", partial(RuntimeError, "anything"), True),
    ],
)
def test_an_error_ends_its_delivery_only(
    pair: tuple[Worker, Worker, Scripted],
    caplog: pytest.LogCaptureFixture,
    call: str,
    error: partial[Exception],
    kept: bool,
    number: int,
) -> None:
    """It ends after the slices in flight. If parts may still arrive, decode's blocks go into
    quarantine; prefill's are freed: late bytes reach unused blocks.
    """
    producer, consumer, transport = pair
    transport.held = True
    # Only a post that has certainly posted nothing is tried again: a second write could end before
    # the bytes of the first arrive.
    transport.errors = {(call, each): error for each in range(number, number + (1 if kept else 2))}
    producer.step(chunks=[WHOLE])
    until(lambda: transport.posts > (1 if call == "poll" else number))
    if number or call == "poll":
        no_result(producer, consumer)
        assert producer.runtime.counts()["writes"] == 1
    transport.held = False
    assert results(consumer) == FAILED
    assert consumer.runtime.report() == (WorkerReport(QuarantineReport(begun=[Kept("r", "t")])) if kept else None)
    assert caplog.text.count("RuntimeError: anything") == (error.func is RuntimeError)
    producer.step(finished=[SENT])
    assert results(producer) == ({"q"}, set(), set())
    assert not transport._pending  # noqa: SLF001
    assert not kept or transport.posts == (2 if call == "poll" else number + 1)
    transport.errors = {}
    assert transfer(producer, consumer, "2") == (set(), {"r2"}, set())
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]
    until(lambda: not any(producer.runtime.counts()[stage] for stage in ("early", "live", "held", "writes")))


def test_a_preemption_waits_for_unposted_slices(
    pair: tuple[Worker, Worker, Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write counts as open before its first post. Posted within fence_s, it is complete."""
    producer, consumer, transport = pair
    posting(producer, 0)
    clock = Clock(monkeypatch)

    def during() -> None:
        transport.gate.set()
        until(lambda: producer.runtime.counts()["writes"] == 0)

    clock.during = during
    producer.step(preempted=["q"])
    assert clock.rests
    producer.cache[[1, 2]] = 0
    producer.step(chunks=[WHOLE])
    assert results(consumer) == ARRIVED
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]


@pytest.mark.parametrize("memory", ["VRAM", "DRAM"])
def test_a_post_from_a_device_is_polled_without_pauses(worker: Callable[..., Worker], memory: str) -> None:
    """For a bounded time: RDMA writes from a device end within microseconds."""
    producer = worker("p", transport_class=Scripted, memory_kind=MemoryKind(memory, 0))
    scripted(producer).held = True
    worker("c").step(receives=[receive(producer.address)])
    compute(producer)
    until(lambda: posted(producer))
    pauses = []
    for posted_at in (float("inf"), float("-inf")):  # just now, long ago
        producer.runtime._writes.posted_at = posted_at  # noqa: SLF001
        pauses.append(producer.runtime._pause_s())  # noqa: SLF001
    on_device = [runtime._SPIN_PAUSE_S, runtime._BUSY_S]  # noqa: SLF001
    assert pauses == (on_device if memory == "VRAM" else [runtime._BUSY_S] * 2)  # noqa: SLF001


def test_a_slow_write_is_logged_once(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each counts in the metric. Between host memories, no bandwidth is expected."""
    monkeypatch.setattr(writes, "is_slow", lambda *_: True)
    gpu, host = worker("gpu", memory_kind=MemoryKind("VRAM", 0)), worker("host")
    for number, (source, target) in enumerate([(gpu, host), (host, gpu), (gpu, host), (host, worker("other"))]):
        target.step(receives=[receive(source.address, f"r{number}", f"t{number}")])
        compute(source, str(number))
        while f"r{number}" not in target.runtime.results()[1]:
            source.step()
    stats = gpu.runtime.stats(), host.runtime.stats()
    assert [each and each.data["counts"]["writes"] for each in stats] == [{"slow": 2}, {"slow": 1, "done": 1}]
    assert caplog.text.count("UCX probably copies it through host memory over TCP") == 2, "one a worker"


@pytest.mark.parametrize(
    ("size_bytes", "runs", "seconds", "slow"),
    [
        (2**30, 1024, 0.6, True),
        (2**30, 1024, 0.5, False),
        (2**30, 16_384, 0.6, False),
        (2**25, 32, 9.0, False),
    ],
    ids=["below 2 GB/s", "above", "posting takes the time", "too small"],
)
def test_a_slow_write(size_bytes: int, runs: int, seconds: float, slow: bool) -> None:
    """The posts of many small runs take time on any link."""
    assert writes.is_slow(size_bytes, runs, seconds) == slow
