"""A write reported as failed whose bytes arrive later: they reach no other request's blocks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from connectors.codec import decode
from connectors.errors import FailedWriteError, TransportError
from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind
from connectors.protocol.wire import Cancel, Peer
from connectors.vllm_hma.handshake import probe
from connectors.vllm_hma.handshake.processes import Liveness
from connectors.vllm_hma.orders import Chunk, Expect, Finished
from connectors.vllm_hma.reports import Kept, QuarantineReport, WorkerReport
from testing.connector_state import snapshot
from testing.memory_transport import MemoryTransport
from tests.vllm_contract.workers import DIGEST, Worker, receive, results, until


class FailsThenLands(MemoryTransport):
    """A write that fails in ``post`` or ``poll`` with bytes in flight; ``land`` completes it.

    NIXL fails in ``nixl post``, ``post`` is any other error.
    """

    fails_in = "poll"

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.late: list[tuple[str, Runs, MemoryKind, MemoryKind]] = []

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        self.late.append((peer, runs, source, target))
        if self.fails_in == "nixl post":
            raise FailedWriteError(peer, "posting a write failed: NIXL reports its state as ERR")
        if self.fails_in == "post":
            raise RuntimeError("posting failed after the first of many descriptors")
        return len(self.late)

    def poll(self, handle: int) -> bool:
        raise TransportError("c/0", "a write failed")

    def land(self) -> None:
        for write in self.late:
            super().poll(super().write(*write))


class RefusesWrites(MemoryTransport):
    """Nothing of the write is posted."""

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        raise TransportError(peer, "not connected")


def failed(worker: Callable[..., Worker], transport: type[MemoryTransport]) -> tuple[Worker, Worker]:
    """A producer whose only write has failed, and its consumer, whose request has failed as
    well.
    """
    producer, consumer = worker("p", transport_class=transport), worker("c")
    producer.cache[:] = 7
    consumer.step(receives=[receive(producer.address)])
    producer.step(expects=[Expect("q", "t", 7, DIGEST)])
    producer.step(chunks=[Chunk("q", ((1, 2),), 7)])
    assert results(consumer) == (set(), {"r"}, {"r"})
    return producer, consumer


@pytest.mark.parametrize("fails_in", ["post", "nixl post", "poll"])
def test_bytes_of_a_failed_write_meet_nobody_elses_blocks(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, fails_in: str
) -> None:
    """The request is computed in other blocks at once; its own stay in quarantine while the
    producer lives.
    """
    monkeypatch.setattr(FailsThenLands, "fails_in", fails_in)
    producer, consumer = failed(worker, FailsThenLands)
    report = consumer.runtime.report()
    if report is None:
        consumer.cache[[3, 5]] = 42  # vLLM allocates the blocks to another request
    assert isinstance(producer.transport, FailsThenLands)
    assert len(producer.transport.late) == 1, "a second write could end before the bytes of the first arrive"
    producer.transport.land()
    assert 7 not in consumer.cache[[3, 5]] or report is not None, "another request's blocks were overwritten"
    assert report == WorkerReport(QuarantineReport(begun=[Kept("r", "t")]))


def test_the_producer_holds_nothing_for_a_failed_write(worker: Callable[..., Worker]) -> None:
    """The producer frees its blocks: a late write would read them into unused blocks."""
    producer, _ = failed(worker, FailsThenLands)
    producer.step(finished=[Finished("q", True, "")])
    assert results(producer) == ({"q"}, set(), set())
    until(lambda: not any(producer.runtime.counts()[stage] for stage in ("early", "live", "held", "writes")))


def test_a_supervisor_ends_the_quarantine_of_a_failed_write(impatient: Callable[..., Worker]) -> None:
    """The producer answers no Cancel, however often it is sent; only the producer's end frees
    the blocks.
    """
    producer, consumer = failed(impatient, FailsThenLands)
    cancels: list[int] = []
    sends = consumer.transport.notify

    def counted(peer: str, payload: bytes) -> None:
        cancels.append(isinstance(decode(payload).message, Cancel))
        sends(peer, payload)

    consumer.transport.notify = counted  # type: ignore[method-assign]
    until(lambda: sum(cancels) >= 3)
    assert consumer.runtime.counts()["quarantined"] == 1
    consumer.step(lost=[producer.agent_metadata.incarnation])
    assert consumer.runtime.counts()["quarantined"] == 0


def test_the_end_of_the_consumers_process_ends_the_memory_of_a_failed_write(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No report is needed: both workers run on one host."""
    monkeypatch.setattr(probe, "CONFIRM_S", 0.01)
    producer, _ = failed(worker, FailsThenLands)
    until(lambda: snapshot(producer.runtime).probed == {Peer("c", 0)})
    assert snapshot(producer.runtime).producer.failed == {Peer("c", 0): {"t"}}
    monkeypatch.setattr(probe, "liveness", lambda _: Liveness.GONE)
    until(lambda: not snapshot(producer.runtime).producer.failed)
    until(lambda: not snapshot(producer.runtime).probed)


def test_a_write_of_which_nothing_was_posted_frees_the_blocks(worker: Callable[..., Worker]) -> None:
    """The producer acknowledges: no write is in flight."""
    _, consumer = failed(worker, RefusesWrites)
    assert consumer.runtime.report() is None
    assert consumer.runtime.counts()["quarantined"] == 0


def test_the_next_transfer_of_the_pair_succeeds(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """One failed write costs the blocks of one request, not the pair."""
    producer, consumer = failed(worker, FailsThenLands)
    monkeypatch.setattr(FailsThenLands, "write", MemoryTransport.write)
    monkeypatch.setattr(FailsThenLands, "poll", MemoryTransport.poll)
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    producer.step(expects=[Expect("q2", "t2", 7, DIGEST)], chunks=[Chunk("q2", ((1, 2),), 7)])
    assert results(consumer) == (set(), {"r2"}, set())
