"""Handshakes during which a machine removes the peer: they succeed, on either side."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from connectors.protocol.wire import Peer
from connectors.vllm_hma.handshake.peers import PeerTable
from testing.connector_state import snapshot
from testing.memory_transport import MemoryTransport
from tests.vllm_contract.test_forgetting import delivered, lose, produce
from tests.vllm_contract.workers import Worker, receive, results, until


class Paused(MemoryTransport):
    """``add_peer`` waits, before or after it has added the peer, until ``go`` is set."""

    before = True

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.go, self.waits = threading.Event(), threading.Event()
        self.go.set()

    def add_peer(self, metadata: bytes, name: str | None = None) -> str:
        if not self.before:
            super().add_peer(metadata, name)
        self.waits.set()
        assert self.go.wait(30)
        return super().add_peer(metadata, name) if self.before else str(name)

    def pause(self, before: bool) -> None:
        self.before = before
        self.waits.clear()
        self.go.clear()


def paused(worker: Worker) -> Paused:
    assert isinstance(worker.transport, Paused)
    return worker.transport


def greet_again(consumer: Worker, producer: Worker, request: str) -> None:
    """The consumer has removed the producer engine, as after forget_s / 2; then a request
    arrives.
    """
    runtime = consumer.runtime
    with runtime._lock:  # noqa: SLF001 - no event makes one machine alone forget a peer at a chosen moment
        runtime._perform(runtime._consumer.forget(producer.agent_metadata.incarnation))  # noqa: SLF001 - as above
    consumer.step(receives=[receive(producer.address, request, request)])


@pytest.mark.parametrize("before", [True, False], ids=["before the connection", "behind the connection"])
def test_a_producer_that_removes_its_peer_during_the_handshake(worker: Callable[..., Worker], before: bool) -> None:
    """The Welcome arrives, and the offer after it is accepted."""
    producer, consumer = delivered(lambda name: worker(name, transport_class=Paused))
    paused(producer).pause(before)
    greet_again(consumer, producer, "again")
    until(paused(producer).waits.is_set)
    lose(producer, Peer("c", 0))
    paused(producer).go.set()
    produce(producer, "q-again", "again")
    assert results(consumer) == (set(), {"again"}, set())
    assert (len(snapshot(producer.runtime).peers.planned), set(producer.transport.peers)) == (1, {"c/0"})


@pytest.mark.parametrize("before", [True, False], ids=["before the connection", "behind the connection"])
def test_a_consumer_that_removes_its_peer_during_the_handshake(worker: Callable[..., Worker], before: bool) -> None:
    """A worker's producer machine removes a peer during the handshake with it as a producer."""
    first, second = delivered(lambda name: worker(name, transport_class=Paused))
    paused(first).pause(before)
    first.step(receives=[receive(second.address, "back", "back")])
    until(paused(first).waits.is_set)
    lose(first, Peer("c", 0))
    paused(first).go.set()
    produce(second, "q-back", "back")
    reported: list[tuple[set[str], set[str], set[str]]] = []

    def received() -> bool:
        reported.append(first.runtime.results())
        return "back" in reported[-1][1]

    until(received)
    assert reported[-1][2] == set()


def test_no_peer_is_evicted_during_its_handshake(
    impatient: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the only entry belongs to a peer in a handshake, the new peer is refused and the first
    succeeds.
    """
    monkeypatch.setattr(PeerTable.__init__, "__defaults__", (1,))
    producer = impatient("p", transport_class=Paused)
    consumer, newcomer = impatient("c"), impatient("d")
    paused(producer).pause(before=False)
    consumer.step(receives=[receive(producer.address)])
    until(paused(producer).waits.is_set)
    newcomer.step(receives=[receive(producer.address, "r2", "t2")])
    until(lambda: "peers are busy" in caplog.text)
    paused(producer).go.set()
    produce(producer, "q", "t")
    assert results(consumer) == (set(), {"r"}, set())
    assert results(newcomer) == (set(), {"r2"}, {"r2"})
