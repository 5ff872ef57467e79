"""The cost of a round depends on open transfers, not on remembered ones: counted in bytecodes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from connectors.protocol.consumer import Consumer
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Fin, Peer
from testing.connector_state import snapshot
from tests.protocol.consumption import GROUPS as CONSUMED_GROUPS
from tests.protocol.consumption import LIMITS as CONSUMER_LIMITS
from tests.protocol.consumption import P0, P1, PARTNERS, order
from tests.protocol.production import C0, finish_write, live, offer, only_write


def bytecodes(call: Callable[[], object]) -> int:
    """Return the number of bytecodes of a call."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before, own = sys.gettrace(), inspect.currentframe()
    assert own
    own.f_trace_opcodes = True  # Python 3.12 counts none if no frame has asked before `settrace`
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def producer_with(transfers: int) -> Producer:
    """Return a consumer with this number of ended transfers and one in progress."""
    producer = live()
    for number in range(transfers):
        name = f"t{number}"
        producer.expect(f"r{number}", name, 12, "digest", 0.0)
        producer.progress(f"r{number}", [[1, 2, 3], [4, 5, 6]], 12, 0.0)
        producer.finished(f"r{number}", True, "", 0.0)
        finish_write(producer, only_write(producer.message(C0, offer(name), 0.0)), 61, 0.0)
    return producer


def consumer_with(transfers: int) -> Consumer:
    """Return a producer with this number of ended transfers and one in progress."""
    consumer = Consumer(CONSUMED_GROUPS, CONSUMER_LIMITS)
    consumer.connected("engine-a", PARTNERS, 0.0)
    consumer.start(order(), 0.0)
    for number in range(transfers):
        name = f"t{number}"
        consumer.start(order(f"r{number}", name), 0.0)
        consumer.message(P0, Fin(name, 31), 0.0)
        consumer.message(P1, Fin(name, 60), 0.0)
    return consumer


def test_a_producers_round() -> None:
    """Ids are remembered in the order in which they expire."""
    few, many = producer_with(10), producer_with(200)
    assert many.counts()["remembered"] == 200
    assert bytecodes(lambda: few.tick(0.5)) == bytecodes(lambda: many.tick(0.5))


def test_a_consumers_round() -> None:
    """The producer's ids likewise; and a message finds its transfer without a search."""
    few, many = consumer_with(10), consumer_with(200)
    assert len(snapshot(many).used) == 201
    assert bytecodes(lambda: few.tick(0.5)) == bytecodes(lambda: many.tick(0.5))


def test_peers_that_are_silent_cost_nothing() -> None:
    """Hundreds of decode workers are known; one sends messages."""

    def known(peers: int) -> Producer:
        producer = live()
        for number in range(peers):
            producer.welcome(Peer(f"engine-{number}", 0), snapshot(producer).consumers[C0], 0.0)
        return producer

    few, many = known(10), known(200)
    assert bytecodes(lambda: few.tick(0.5)) == bytecodes(lambda: many.tick(0.5))


def test_ids_are_forgotten_all_the_same() -> None:
    """Ids expire at their deadlines, and those of transfers in progress do not."""
    producer, consumer = producer_with(3), consumer_with(3)
    lease_s = CONSUMER_LIMITS.lease_s
    producer.tick(lease_s - 0.1)
    assert producer.counts()["remembered"] == 3
    producer.tick(lease_s)
    assert producer.counts()["remembered"] == 0
    consumer.tick(lease_s - 0.1)
    assert snapshot(consumer).used == {"t", "t0", "t1", "t2"}
    consumer.tick(lease_s)
    assert snapshot(consumer).used == {"t"}
