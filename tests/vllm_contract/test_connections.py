"""Broken connections between two live workers, and unreachable workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import pytest

from connectors.errors import FailedWriteError, TransportError
from connectors.planning.descriptors import Runs
from connectors.planning.layout import MemoryKind
from connectors.vllm_hma.handshake import message_sender
from connectors.vllm_hma.orders import Chunk, Expect
from connectors.vllm_hma.worker_side.writes import Writes
from testing.memory_transport import MemoryTransport
from tests.vllm_contract.workers import DIGEST, LIMITS, Worker, receive, results


class Breakable(MemoryTransport):
    """Transport that acts like NIXL over TCP after a reset: nothing reaches a peer until its
    connection is reopened.
    """

    broken = False

    def notify(self, peer: str, payload: bytes) -> None:
        self._check(peer)
        super().notify(peer, payload)

    def write(self, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        self._check(peer)
        return super().write(peer, runs, source, target)

    def reconnect(self, peer: str) -> None:
        super().reconnect(peer)
        self.broken = False

    def _check(self, peer: str) -> None:
        if self.broken:
            raise TransportError(peer, "NIXL_ERR_REMOTE_DISCONNECT")


def met(worker: Callable[..., Worker]) -> tuple[Worker, Worker]:
    """A producer and a consumer that have completed a first transfer."""
    producer, consumer = (worker(name, transport_class=Breakable) for name in ("p", "c"))
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    deliver(producer, consumer, "first")
    return producer, consumer


def deliver(producer: Worker, consumer: Worker, transfer: str) -> None:
    consumer.cache[:] = 0
    consumer.step(receives=[receive(producer.address, transfer, transfer)])
    producer.step(expects=[Expect(f"q-{transfer}", transfer, 7, DIGEST)])
    producer.step(chunks=[Chunk(f"q-{transfer}", ((1, 2),), 7)])
    assert results(consumer) == (set(), {transfer}, set())
    assert consumer.cache[[3, 5], 0].tolist() == [2, 3]


def break_connection(worker: Worker) -> None:
    assert isinstance(worker.transport, Breakable)
    worker.transport.broken = True


def test_a_connection_that_broke_on_the_consumers_side(worker: Callable[..., Worker]) -> None:
    """The next offer uses a new connection."""
    producer, consumer = met(worker)
    break_connection(consumer)
    deliver(producer, consumer, "second")


def test_a_connection_that_broke_on_the_producers_side(worker: Callable[..., Worker]) -> None:
    """The next write, and Fin after it, use a new connection."""
    producer, consumer = met(worker)
    break_connection(producer)
    deliver(producer, consumer, "second")


def test_a_broken_connection_is_found_before_a_write_is_posted(
    worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write to a broken connection would count as started and quarantine blocks, so a message
    precedes it.
    """
    monkeypatch.setattr(message_sender, "_CHECK_EVERY_S", 0.0)
    producer, consumer = met(worker)
    break_connection(producer)

    def fails(transport: Breakable, peer: str, runs: Runs, source: MemoryKind, target: MemoryKind) -> int:
        if transport.broken:
            raise FailedWriteError(peer, "NIXL_ERR_REMOTE_DISCONNECT")
        return MemoryTransport.write(transport, peer, runs, source, target)

    monkeypatch.setattr(Breakable, "write", fails)
    deliver(producer, consumer, "second")


def test_an_offer_that_reaches_nobody_holds_no_blocks(worker: Callable[..., Worker]) -> None:
    """An unreachable producer never received the offer: the request is computed at once, without
    quarantine.
    """
    producer, consumer = met(worker)
    consumer.transport.fabric.cut("p/0")
    consumer.step(receives=[receive(producer.address, "lost", "lost")])
    assert results(consumer, within_s=LIMITS.progress_s / 2) == (set(), {"lost"}, {"lost"})
    assert consumer.runtime.counts()["quarantined"] == 0
    consumer.transport.fabric.mend("p/0")
    deliver(producer, consumer, "found")


@pytest.mark.parametrize("part", ["notifications", "poll"])
def test_deadlines_are_kept_whatever_fails_in_every_round(
    impatient: Callable[..., Worker], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the transport can neither receive nor poll, its request is computed after progress_s."""
    producer, consumer = met(impatient)

    def failing(*_: object) -> NoReturn:
        raise RuntimeError("anything")

    if part == "poll":
        monkeypatch.setattr(Writes, "poll", failing)
    else:
        consumer.transport.notifications = failing  # type: ignore[method-assign]
    consumer.step(receives=[receive(producer.address, "unheard", "unheard")])
    assert results(consumer, within_s=60.0) == (set(), {"unheard"}, {"unheard"})
