"""A worker that a runtime has removed: it keeps no state for it, and a new handshake adds it
again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from connectors.protocol.wire import Peer
from connectors.vllm_hma.orders import Chunk, Expect, Finished
from testing.connector_state import snapshot
from tests.vllm_contract.workers import DIGEST, Worker, receive, results, until


def delivered(worker: Callable[..., Worker]) -> tuple[Worker, Worker]:
    """A producer and a consumer that have completed a transfer."""
    producer, consumer = worker("p"), worker("c")
    consumer.step(receives=[receive(producer.address)])
    produce(producer, "q", "t")
    assert results(consumer) == (set(), {"r"}, set())
    return producer, consumer


def produce(producer: Worker, request: str, transfer: str) -> None:
    producer.step(expects=[Expect(request, transfer, 7, DIGEST)])
    producer.step(chunks=[Chunk(request, ((1, 2),), 7)])
    producer.step(finished=[Finished(request, True, "")])


def lose(producer: Worker, peer: Peer) -> None:
    """The producer treats the consumer as ended."""
    runtime = producer.runtime
    with runtime._lock:  # noqa: SLF001 - no event makes one machine alone forget a peer at a chosen moment
        runtime._perform(runtime._producer.peer_lost(peer, time.monotonic()))  # noqa: SLF001 - as above
    until(lambda: peer not in snapshot(runtime).producer.heard_at)


def test_nothing_is_kept_for_a_forgotten_worker(worker: Callable[..., Worker]) -> None:
    """Neither the worker's plan nor its connection remains."""
    producer, _ = delivered(worker)
    assert (len(snapshot(producer.runtime).peers.planned), set(producer.transport.peers)) == (1, {"c/0"})
    lose(producer, Peer("c", 0))
    assert (len(snapshot(producer.runtime).peers.planned), set(producer.transport.peers)) == (0, set())


def test_a_worker_that_is_known_in_another_role_keeps_its_connection(worker: Callable[..., Worker]) -> None:
    """The consumer of one transfer produces another: only the first role's state is removed."""
    producer, consumer = delivered(worker)
    producer.step(receives=[receive(consumer.address, "r2", "t2")])
    produce(consumer, "q2", "t2")
    until(lambda: "r2" in producer.runtime.results()[1])
    lose(producer, Peer("c", 0))
    assert (len(snapshot(producer.runtime).peers.planned), set(producer.transport.peers)) == (0, {"c/0"})


def test_a_forgotten_worker_is_answered_in_the_end(impatient: Callable[..., Worker]) -> None:
    """The worker's offer is ignored; its Cancel starts a handshake, and its blocks are released."""
    producer, consumer = delivered(impatient)
    lose(producer, Peer("c", 0))
    consumer.step(receives=[receive(producer.address, "r2", "t2")])
    assert results(consumer) == (set(), {"r2"}, {"r2"})
    consumer.step(receives=[receive(producer.address, "r3", "t3")])
    produce(producer, "q3", "t3")
    assert results(consumer) == (set(), {"r3"}, set())
