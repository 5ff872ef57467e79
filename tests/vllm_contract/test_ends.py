"""A worker ends transfers when the scheduler, the transport or the peer ends a part first."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest

from connectors.codec import decode
from connectors.errors import FailedWriteError
from connectors.protocol.wire import Alive, Cancel, Peer
from connectors.vllm_hma.handshake import probe
from connectors.vllm_hma.handshake.processes import Liveness
from connectors.vllm_hma.orders import Chunk, Finished, Orders
from connectors.vllm_hma.reports import Kept, QuarantineReport, WorkerReport
from connectors.vllm_hma.worker_side import runtime
from testing.connector_state import snapshot
from tests.vllm_contract.workers import (
    ARRIVED,
    EXPECT,
    FAILED,
    NOTHING,
    SHORT,
    WHOLE,
    Scripted,
    Worker,
    compute,
    posted,
    receive,
    results,
    scripted,
    until,
)

KEPT = Kept("r", "t")
STEP = dataclasses.replace(SHORT, step_s=1.0)


class HeldWrites(Scripted):
    """Writes complete only after ``let_go``, as over a slow network."""

    held = True


def both_ends(worker: Callable[..., Worker], **producers: object) -> tuple[Worker, Worker]:
    """A producer whose only write is in flight, with the whole prompt computed, and its
    consumer.
    """
    producer, consumer = worker("p", transport_class=HeldWrites, **producers), worker("c")
    consumer.step(receives=[receive(producer.address)])
    compute(producer)
    until(lambda: posted(producer))
    return producer, consumer


def let_go(producer: Worker) -> None:
    scripted(producer).held = False


def count(worker: Worker, kind: type) -> list[int]:
    """Count the messages of a kind that this worker sends from now on."""
    sent, notify = [0], worker.transport.notify

    def counted(peer: str, payload: bytes) -> None:
        notify(peer, payload)
        sent[0] += isinstance(decode(payload).message, kind)

    worker.transport.notify = counted  # type: ignore[method-assign]
    return sent


def test_an_abort_while_the_last_write_is_in_flight(worker: Callable[..., Worker]) -> None:
    """The transfer of an ended request is aborted before a step may overwrite its blocks: no
    Fin.
    """
    producer, consumer = both_ends(worker)
    orders = Orders(finished=[Finished("q", False, "aborted")])
    producer.runtime.before_forward(orders)
    let_go(producer)
    producer.runtime.after_forward(orders)
    assert results(consumer) == FAILED


def test_a_request_that_comes_and_goes_between_two_steps(worker: Callable[..., Worker]) -> None:
    producer = worker("p")
    producer.step(expects=[EXPECT], finished=[Finished("q", False, "aborted")])
    assert producer.runtime.counts()["live"] == 0


def test_a_write_that_hangs_is_no_sign_of_life(impatient: Callable[..., Worker]) -> None:
    """The consumer abandons the transfer after progress_s of a hanging write, and keeps
    its blocks until the producer answers.
    """
    producer, consumer = both_ends(impatient)
    assert results(consumer) == FAILED
    assert consumer.runtime.report() == WorkerReport(QuarantineReport(begun=[KEPT]))
    assert (consumer.runtime.counts()["quarantined"], consumer.runtime.report()) == (1, None)
    let_go(producer)
    until(lambda: consumer.runtime.counts()["quarantined"] == 0)
    assert consumer.runtime.report() == WorkerReport(QuarantineReport(ended=[KEPT]))
    assert (consumer.runtime.results(), consumer.runtime.report()) == (NOTHING, None)


@pytest.mark.parametrize("fails", [False, True], ids=["silent", "its write has failed"])
def test_only_a_supervisor_ends_the_quarantine_of_a_lost_engine(impatient: Callable[..., Worker], fails: bool) -> None:
    """Neither answers Cancel, however often it is sent. A report of another host has no effect."""
    producer, consumer = both_ends(impatient)
    if fails:
        scripted(producer).errors["poll", 0] = partial(FailedWriteError, "c/0", "parts may arrive")
        let_go(producer)
    assert results(consumer) == FAILED
    assert consumer.runtime.report() == WorkerReport(QuarantineReport(begun=[KEPT]))
    cancels = count(consumer, Cancel)
    until(lambda: cancels[0] >= 3)
    consumer.step(lost=["another host."])
    assert consumer.runtime.report() is None
    consumer.step(lost=["another host.", "p"])
    assert consumer.runtime.report() == WorkerReport(QuarantineReport(ended=[KEPT]))
    assert consumer.runtime.counts()["quarantined"] == 0


def test_the_end_of_the_consumers_process_ends_the_memory_of_a_failed_write(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No report is needed: both workers run on one host."""
    monkeypatch.setattr(probe, "CONFIRM_S", 0.01)
    producer, consumer = both_ends(worker)
    scripted(producer).errors["poll", 0] = partial(FailedWriteError, "c/0", "parts may arrive")
    let_go(producer)
    assert results(consumer) == FAILED
    until(lambda: snapshot(producer.runtime).probed == {Peer("c", 0)})
    assert snapshot(producer.runtime).producer.failed == {Peer("c", 0): {"t"}}
    monkeypatch.setattr(probe, "liveness", lambda _: Liveness.GONE)
    until(lambda: not snapshot(producer.runtime).producer.failed)
    until(lambda: not snapshot(producer.runtime).probed)


def test_an_engine_that_hangs_keeps_no_consumer_waiting(worker: Callable[..., Worker]) -> None:
    """The progress thread answers: decode computes the prompt, and its blocks are freed at once."""
    # Longer than a pause of the machine, which would also end the wait.
    patient = dataclasses.replace(SHORT, progress_s=4.0)
    producer, consumer = worker("p", limits=STEP), worker("c", limits=patient)
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    producer.step(chunks=[Chunk("q", ((1,),), 4)])
    assert results(consumer) == FAILED
    assert KEPT not in (consumer.runtime.report() or WorkerReport()).quarantine.begun


def test_an_engine_that_steps_keeps_its_consumers(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the request waits, other requests' steps keep the heartbeat."""
    now = [time.monotonic()]
    monkeypatch.setattr(runtime, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    producer, consumer = worker("p", limits=STEP), worker("c", limits=SHORT)
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[EXPECT])
    until(lambda: producer.runtime.counts()["live"] == consumer.runtime.counts()["offered"] == 1)
    alive = count(producer, Alive)
    for turn in range(30):  # more than six seconds on the clock of both workers
        producer.step()
        # More than alive_s: a sum of floats may round to slightly less.
        now[0] += 1.1 * STEP.alive_s
        until(lambda turn=turn: alive[0] > turn)  # type: ignore[misc]
        assert consumer.runtime.results() == NOTHING
    producer.step(chunks=[WHOLE])
    assert results(consumer) == ARRIVED
