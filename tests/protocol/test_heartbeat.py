"""Alive shows that the engine makes progress, not only that its progress thread runs."""

from __future__ import annotations

from dataclasses import replace

from connectors.planning.blocks import UnitShape
from connectors.protocol.actions import Send
from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Alive
from tests.protocol.production import C0, GROUPS, LIMITS, TABLES, finish_write, offer, only_write

STEP = replace(LIMITS, step_s=50.0)


def waiting() -> Producer:
    """Return a machine with a request expected and offered at 0, and no step since."""
    producer = Producer(GROUPS, STEP)
    producer.welcome(C0, ConsumerPeer(frozenset({0}), 100, (UnitShape(4, 1, 1), UnitShape(4, 1, 1))), 0.0)
    producer.expect("r", "t", 12, "digest", 0.0)
    producer.message(C0, offer(), 0.0)
    return producer


def says_alive(producer: Producer, now: float) -> bool:
    return Send(C0, Alive("t")) in producer.tick(now)


def test_a_step_that_takes_long_keeps_the_heartbeat() -> None:
    """The first step compiles; a chunk of a long prompt takes long."""
    assert says_alive(waiting(), STEP.step_s - 0.1)


def test_a_step_that_does_not_end_stops_it() -> None:
    """The next step that ends starts Alive again."""
    producer = waiting()
    assert not says_alive(producer, STEP.step_s)
    producer.stepped(STEP.step_s + 1.0)
    assert says_alive(producer, STEP.step_s + 2.0)
    assert not says_alive(producer, 2 * STEP.step_s + 1.0)


def test_an_idle_engine_owes_no_steps() -> None:
    """The time counts from the request's arrival, not from an earlier step."""
    producer = Producer(GROUPS, STEP)
    producer.stepped(0.0)
    producer.welcome(C0, ConsumerPeer(frozenset({0}), 100, (UnitShape(4, 1, 1), UnitShape(4, 1, 1))), 0.0)
    producer.expect("r", "t", 12, "digest", 1000.0)
    producer.message(C0, offer(), 1000.0)
    assert says_alive(producer, 1000.0 + STEP.step_s - 1.0)


def test_a_request_that_has_finished_needs_no_steps() -> None:
    """After the computation, only the transport matters; an idle engine takes no steps."""
    producer = waiting()
    write = only_write(producer.progress("r", *TABLES, 1.0))
    producer.finished("r", True, "", 2.0)
    producer.write_posted(write.write_id, 61)
    assert says_alive(producer, 5.0)
    late = STEP.step_s + 5.0
    assert not says_alive(producer, late), "a write that hangs is no sign of life"
    assert finish_write(producer, write, 61, late)
