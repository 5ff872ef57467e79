"""A write is posted in slices by the progress thread, without the worker's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from connectors.errors import FailedWriteError, TransportError
from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind
from connectors.vllm_hma.orders import Chunk, Expect
from connectors.vllm_hma.reports import Kept, QuarantineReport, WorkerReport
from connectors.vllm_hma.worker_side import writes
from testing.connector_state import snapshot
from testing.memory_transport import MemoryTransport
from tests.vllm_contract.test_preemption_fence import Clock
from tests.vllm_contract.workers import DIGEST, Worker, receive, results, until

GIVE_UP_S = 10.0


class SlowPosts(MemoryTransport):
    """The post of slice number ``slow`` lasts until ``gate`` opens; ``ends`` lets slices end.

    ``errors``  error of the post of a slice, by its number
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.slow, self.posts, self.late = 0, 0, False
        self.errors: dict[int, Callable[[], Exception]] = {}
        self.posting, self.gate, self.ends = threading.Event(), threading.Event(), threading.Event()
        self.ends.set()

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        number, self.posts = self.posts, self.posts + 1
        if number == self.slow:
            self.posting.set()
            self.late |= not self.gate.wait(GIVE_UP_S)
        if number in self.errors:
            raise self.errors[number]()
        return super().write(peer, runs, source, target)

    def poll(self, handle: int) -> bool:
        return self.ends.is_set() and super().poll(handle)


@pytest.fixture
def pair(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> tuple[Worker, Worker, SlowPosts]:
    """A producer that posts one block a slice, a consumer that has sent its offer, and the
    producer's transport.
    """
    monkeypatch.setattr(writes, "SLICE_RUNS", 1)
    producer, consumer = worker("p", transport_class=SlowPosts), worker("c")
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    assert isinstance(producer.transport, SlowPosts)
    return producer, consumer, producer.transport


def compute(producer: Worker) -> None:
    """Compute the prompt of the pair's request in one chunk: blocks 1 and 2."""
    producer.step(chunks=[Chunk("q", ((1, 2),), 7)])


def test_a_post_delays_no_step_and_no_message(pair: tuple[Worker, Worker, SlowPosts]) -> None:
    """The engine's thread neither posts nor waits for a post, and peers are answered meanwhile."""
    producer, consumer, transport = pair
    compute(producer)
    assert transport.posting.wait(GIVE_UP_S)
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    until(lambda: consumer.runtime.counts()["offered"] == 2)
    producer.step(expects=[Expect("q2", "t2", 7, DIGEST)])
    until(lambda: len(snapshot(producer.runtime).producer.offers) == 2)
    assert not transport.late, "a step or a message waited for the post"
    transport.gate.set()
    assert results(consumer) == (set(), {"r"}, set())
    assert transport.posts == 2
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]


def test_fin_follows_the_last_slice(pair: tuple[Worker, Worker, SlowPosts]) -> None:
    """The first slice has ended, the second is being posted: the consumer has no result."""
    producer, consumer, transport = pair
    transport.slow = 1
    compute(producer)
    assert transport.posting.wait(GIVE_UP_S)
    for _ in range(3):
        producer.step()
        assert consumer.runtime.results() == (set(), set(), set())
    assert producer.runtime.counts()["writes"] == 1
    transport.gate.set()
    assert results(consumer) == (set(), {"r"}, set())


def test_an_abort_stops_the_slices(pair: tuple[Worker, Worker, SlowPosts]) -> None:
    """The consumer's blocks stay allocated until the slice that is being posted has ended."""
    producer, consumer, transport = pair
    compute(producer)
    assert transport.posting.wait(GIVE_UP_S)
    transport.ends.clear()
    consumer.step(aborts=["r"])

    def given_up() -> bool:
        producer.step()
        return not producer.runtime._producer.wants(1)  # noqa: SLF001

    until(given_up)
    transport.gate.set()
    until(lambda: bool(transport._pending))  # noqa: SLF001 (the slice is in flight)
    for _ in range(3):
        producer.step()
        assert consumer.runtime.results() == (set(), set(), set())
    transport.ends.set()
    assert results(consumer) == (set(), {"r"}, {"r"})
    assert consumer.runtime.report() is None
    assert (transport.posts, consumer.cache[[3, 5], 0].tolist()) == (1, [2, 0])


@pytest.mark.parametrize(
    ("error", "kept"),
    [(partial(TransportError, "c/0", "-"), False), (partial(FailedWriteError, "c/0", "-"), True), (ValueError, True)],
    ids=["nothing posted", "parts posted", "anything"],
)
def test_an_error_in_a_later_slice(
    pair: tuple[Worker, Worker, SlowPosts], error: Callable[[], Exception], kept: bool
) -> None:
    """It ends this delivery only, after the slices in flight; quarantine if parts may arrive."""
    producer, consumer, transport = pair
    transport.gate.set()
    transport.ends.clear()
    transport.errors = {1: error}
    compute(producer)
    until(lambda: transport.posts > 1)
    for _ in range(3):
        producer.step()
        assert consumer.runtime.results() == (set(), set(), set())
    assert producer.runtime.counts()["writes"] == 1
    transport.ends.set()
    assert results(consumer) == (set(), {"r"}, {"r"})
    assert consumer.runtime.report() == (WorkerReport(QuarantineReport(begun=[Kept("r", "t")])) if kept else None)
    assert not transport._pending  # noqa: SLF001
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    producer.step(expects=[Expect("q2", "t2", 7, DIGEST)], chunks=[Chunk("q2", ((1, 2),), 7)])
    assert results(consumer) == (set(), {"r2"}, set())


def test_a_preemption_waits_for_unposted_slices(
    pair: tuple[Worker, Worker, SlowPosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write counts as open before its first post. Posted within fence_s, it is complete."""
    producer, consumer, transport = pair
    compute(producer)
    assert transport.posting.wait(GIVE_UP_S)
    clock = Clock(monkeypatch)

    def during() -> None:
        transport.gate.set()
        until(lambda: producer.runtime.counts()["writes"] == 0)

    clock.during = during
    producer.step(preempted=["q"])
    assert clock.rests
    producer.cache[[1, 2]] = 0
    producer.step(chunks=[Chunk("q", ((3, 4),), 7)])
    assert results(consumer) == (set(), {"r"}, set())
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]


def test_a_slow_write_is_logged_once(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each counts in the metric. Between host memories, no bandwidth is expected."""
    monkeypatch.setattr(writes, "is_slow", lambda *_: True)
    gpu, host = worker("gpu", memory_kind=MemoryKind("VRAM", 0)), worker("host")
    for number, (source, target) in enumerate([(gpu, host), (host, gpu), (gpu, host), (host, host)]):
        if source is target:
            target = worker("other")
        name = f"t{number}"
        target.step(receives=[receive(source.address, name, name)])
        source.step(expects=[Expect(f"q{name}", name, 7, DIGEST)], chunks=[Chunk(f"q{name}", ((1, 2),), 7)])
        while name not in target.runtime.results()[1]:
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
