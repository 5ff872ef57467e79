"""Decode workers that a full producer removes, and their return."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet

import numpy as np
import pytest

from connectors.errors import HandshakeError
from connectors.protocol.wire import Peer
from connectors.vllm_hma.handshake.peers import PeerTable
from connectors.vllm_hma.orders import Chunk, Expect
from testing.connector_state import snapshot
from tests.vllm_contract.workers import DIGEST, Worker, receive, results


def peer(name: str) -> Peer:
    return Peer(name, 0)


def full(busy: AbstractSet[str] = frozenset()) -> PeerTable:
    """A table of three: a and b have sent Hello, c has sent an offer."""
    table = PeerTable(lambda one: one.incarnation in busy, most=3)
    for name in "abc":
        assert table.admit(peer(name)) is None
    table.spoke(peer("c"))
    return table


@pytest.mark.parametrize(
    ("hellos", "offers", "evicted"),
    [
        # The least recent peer with only a Hello; a flood of Hellos evicts its own entries.
        (["n0", "n1", "n2", "n3"], [], ["a", "b", "n0", "n1"]),
        # Among peers with offers, the least recent one.
        (["d"], ["a", "b", "c", "a"], ["b"]),
        # A second Hello takes no second place, a has just repeated its, and c keeps its offer.
        (["a", "c", "d", "e", "f"], [], [None, None, "b", "a", "d"]),
        # Only a Hello adds a peer.
        (["d"], ["d"], ["a"]),
    ],
)
def test_who_is_evicted(hellos: list[str], offers: list[str], evicted: list[str | None]) -> None:
    table = full()
    for name in offers:
        table.spoke(peer(name))
    assert [table.admit(peer(name)) for name in hellos] == [name and peer(name) for name in evicted]
    assert len(table) == 3


def test_the_busy_stay() -> None:
    """Writes to them are in flight. If all are busy, the new peer is refused."""
    assert full({"a", "b"}).admit(peer("d")) == peer("c")
    with pytest.raises(HandshakeError, match="all 3 peers are busy"):
        full({"a", "b", "c"}).admit(peer("d"))


def deliver(producer: Worker, consumer: Worker, name: str) -> tuple[set[str], set[str], set[str]]:
    """Run a whole transfer; return the consumer's results."""
    consumer.cache[:] = 0
    consumer.step(receives=[receive(producer.address, name, name)])
    producer.step(expects=[Expect(f"q-{name}", name, 7, DIGEST)], chunks=[Chunk(f"q-{name}", ((1, 2),), 7)])
    return results(consumer)


def test_a_worker_that_was_forgotten_is_met_again(
    impatient: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode computes its next request; the one after it starts a new handshake."""
    monkeypatch.setattr(PeerTable.__init__, "__defaults__", (2,))
    producer = impatient("p")
    producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
    first, *others = (impatient(f"c{number}") for number in range(4))
    assert deliver(producer, first, "first") == (set(), {"first"}, set())
    for number, consumer in enumerate(others):
        assert deliver(producer, consumer, f"other-{number}") == (set(), {f"other-{number}"}, set())
    kept = snapshot(producer.runtime).peers
    assert len(kept.admitted) == len(kept.planned) == len(producer.transport.peers) == 2
    assert deliver(producer, first, "lost") == (set(), {"lost"}, {"lost"})
    assert deliver(producer, first, "found") == (set(), {"found"}, set())
    assert first.cache[[3, 5], 0].tolist() == [2, 3]


def test_producers_are_forgotten_too(worker: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode engine outlives many prefill engines; it keeps the last ones, and reconnects to a
    removed one.
    """
    monkeypatch.setattr(PeerTable.__init__, "__defaults__", (2,))
    consumer = worker("c")
    producers = [worker(f"p{number}") for number in range(4)]
    for number, producer in enumerate([*producers, producers[0]]):
        producer.cache[:] = np.arange(1, 9, dtype=np.uint8)[:, None]
        assert deliver(producer, consumer, f"t{number}") == (set(), {f"t{number}"}, set())
        assert consumer.cache[[3, 5], 0].tolist() == [2, 3]
    assert len(consumer.transport.peers) == len(snapshot(consumer.runtime).consumer.partners) == 2
