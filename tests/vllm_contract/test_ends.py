"""A worker ends transfers when the scheduler, the transport or the peer ends a part first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from connectors.planning.layout import MemoryKind
from connectors.vllm_hma.orders import Chunk, Expect, Finished, Orders
from connectors.vllm_hma.reports import Kept, QuarantineReport, WorkerReport
from testing.memory_transport import MemoryTransport
from tests.vllm_contract.workers import DIGEST, Worker, posted, receive, results, until

KEPT = Kept("r", "t")


class HeldWrites(MemoryTransport):
    """Writes complete only once ``let_go`` is set, as over a slow network."""

    let_go = False

    def poll(self, handle: int) -> bool:
        return self.let_go and super().poll(handle)


def both_ends(worker: Callable[..., Worker], **producers: object) -> tuple[Worker, Worker]:
    """A producer whose only write is in flight, with the whole prompt computed, and its
    consumer.
    """
    producer, consumer = worker("p", transport_class=HeldWrites, **producers), worker("c")
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    producer.step(chunks=[Chunk("q", ((1, 2),), 7)])
    until(lambda: posted(producer))
    return producer, consumer


def let_go(producer: Worker) -> None:
    assert isinstance(producer.transport, HeldWrites)
    producer.transport.let_go = True


def test_an_abort_while_the_last_write_is_in_flight(worker: Callable[..., Worker]) -> None:
    """The transfer of an ended request is aborted before a step may overwrite its blocks: no
    Fin.
    """
    producer, consumer = both_ends(worker)
    orders = Orders(finished=[Finished("q", False, "aborted")])
    producer.runtime.before_forward(orders)
    let_go(producer)
    producer.runtime.after_forward(orders)
    assert results(consumer) == (set(), {"r"}, {"r"})


def test_a_request_that_comes_and_goes_between_two_steps(worker: Callable[..., Worker]) -> None:
    """A request queued and aborted before any step leaves nothing behind."""
    producer = worker("p")
    producer.step(expects=[Expect("q", "t", 7, DIGEST)], finished=[Finished("q", False, "aborted")])
    assert producer.runtime.counts()["live"] == 0


def test_preemption_waits_for_the_write(worker: Callable[..., Worker]) -> None:
    """A write that ends within fence_s is complete: the transfer continues, and written units
    count.
    """
    producer, consumer = both_ends(worker)
    let_go(producer)
    producer.step(preempted=["q"])
    producer.step(chunks=[Chunk("q", ((3, 4),), 7)])
    assert results(consumer) == (set(), {"r"}, set())
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]


def test_preemption_on_an_accelerator_gives_up_every_write(worker: Callable[..., Worker]) -> None:
    """vLLM has queued the overwriting kernels before the call, so even a successful write may
    have read their output.
    """
    producer, consumer = both_ends(worker, memory_kind=MemoryKind("VRAM", 0))
    let_go(producer)
    producer.step(preempted=["q"])
    producer.step(chunks=[Chunk("q", ((3, 4),), 7)])
    assert results(consumer) == (set(), {"r"}, {"r"})


def test_preemption_gives_up_a_write_that_hangs(worker: Callable[..., Worker]) -> None:
    """A write longer than fence_s may read foreign bytes: its consumer receives Aborted after
    the write.
    """
    producer, consumer = both_ends(worker)
    producer.step(preempted=["q"])
    let_go(producer)
    producer.step(chunks=[Chunk("q", ((3, 4),), 7)])
    assert results(consumer) == (set(), {"r"}, {"r"})


def test_a_write_that_hangs_is_no_sign_of_life(impatient: Callable[..., Worker]) -> None:
    """The consumer abandons the transfer after progress_s of a hanging write, and keeps
    its blocks until the producer answers.
    """
    producer, consumer = both_ends(impatient)
    assert results(consumer) == (set(), {"r"}, {"r"})
    assert consumer.runtime.report() == WorkerReport(QuarantineReport(begun=[KEPT]))
    assert (consumer.runtime.counts()["quarantined"], consumer.runtime.report()) == (1, None)
    let_go(producer)
    until(lambda: consumer.runtime.counts()["quarantined"] == 0)
    assert consumer.runtime.report() == WorkerReport(QuarantineReport(ended=[KEPT]))
    assert (consumer.runtime.results(), consumer.runtime.report()) == ((set(), set(), set()), None)


def test_an_aborted_request_frees_its_blocks_once_writes_have_ended(worker: Callable[..., Worker]) -> None:
    """A consumer's abort is reported only after the producer has acknowledged that it writes no
    more.
    """
    producer, consumer = both_ends(worker)
    consumer.step(aborts=["r"])
    assert consumer.runtime.results() == (set(), set(), set())
    let_go(producer)
    assert results(consumer) == (set(), {"r"}, {"r"})


def test_a_host_that_is_gone(impatient: Callable[..., Worker]) -> None:
    """Without any answer, blocks stay in quarantine until a supervisor reports the engine as lost.

    A report of another host has no effect.
    """
    _, consumer = both_ends(impatient)
    assert results(consumer) == (set(), {"r"}, {"r"})
    assert consumer.runtime.report() == WorkerReport(QuarantineReport(begun=[KEPT]))
    consumer.step(lost=["another host."])
    assert consumer.runtime.report() is None
    consumer.step(lost=["another host.", "p"])
    assert consumer.runtime.report() == WorkerReport(QuarantineReport(ended=[KEPT]))
    assert consumer.runtime.counts()["quarantined"] == 0
