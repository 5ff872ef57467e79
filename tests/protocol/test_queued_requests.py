"""A decode request that waits for its prompt's start: no blocks, a bounded wait, nothing left
behind.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from connectors.protocol.actions import Connect, Due, Received, Send
from connectors.protocol.consumer import Consumer
from connectors.protocol.delivery import MAX_EARLY
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Aborted, Alive, AwaitStart, Cancel, Cancelled, Failed, Fin, Offer, Starting
from testing.connector_state import snapshot
from tests.protocol import consumption, production
from tests.protocol.consumption import ENGINE, LIMITS, P0, P1, PARTNERS, empty, order
from tests.protocol.production import C0, C1, STRANGER, TABLES, held, live, machine, offer

WAITS = AwaitStart("t", 1)


def queued() -> Consumer:
    """Return a machine with a request whose producer was asked at 0."""
    consumer = Consumer(consumption.GROUPS, LIMITS)
    assert consumer.connected("engine-a", PARTNERS, 0.0) == []
    assert consumer.queue("r", "t", ENGINE, 0.0) == [Send(P0, WAITS)]
    return consumer


def in_vain(reason: str, number: int = 2) -> list[object]:
    """Check that the prompt is computed here, and no rank of the producer holds blocks for it."""
    return [Due("r", "t", reason, cancelled=True), Send(P0, Cancel("t", number)), Send(P1, Cancel("t", number))]


# ---- the consumer --------------------------------------------------------------------------------


def test_a_start_makes_it_due_and_then_it_offers() -> None:
    consumer = queued()
    assert consumer.counts()["queued"] == 1
    assert consumer.message(P0, Starting("t"), 1.0) == [Due("r", "t", None)]
    assert empty(consumer)
    sent = consumer.start(order(), 2.0)
    assert [type(send.message) for send in sent if isinstance(send, Send)] == [Offer, Offer]


def test_a_stranger_is_met_before_it_is_asked() -> None:
    consumer = Consumer(consumption.GROUPS, LIMITS)
    assert consumer.queue("r", "t", ENGINE, 0.0) == [Connect(ENGINE)]
    assert consumer.connected("engine-a", PARTNERS, 1.0) == [Send(P0, WAITS)]
    assert consumer.connected("engine-a", PARTNERS, 2.0) == []


def test_a_handshake_that_fails_ends_the_wait() -> None:
    consumer = Consumer(consumption.GROUPS, LIMITS)
    consumer.queue("r", "t", ENGINE, 0.0)
    assert consumer.connect_failed("engine-a", "nobody listens", 1.0) == [Due("r", "t", "nobody listens")]
    assert empty(consumer)
    assert not consumer.busy


@pytest.mark.parametrize("message", [Aborted("t", "no"), Failed("t", "no")])
def test_a_producer_that_will_not_deliver_ends_the_wait(message: Aborted | Failed) -> None:
    consumer = queued()
    assert consumer.message(P0, message, 1.0) == in_vain("no")
    assert empty(consumer)


def test_silence_ends_the_wait_and_alive_puts_that_off() -> None:
    consumer = queued()
    assert consumer.message(P0, Alive("t"), 5.0) == []
    assert consumer.tick(5.0 + LIMITS.progress_s - 0.1) == []
    reason = f"the prefill engine sent no message about the queued transfer for {LIMITS.progress_s:g} s"
    assert consumer.tick(5.0 + LIMITS.progress_s) == in_vain(reason)
    assert empty(consumer)


def test_a_handshake_without_end_ends_the_wait() -> None:
    consumer = Consumer(consumption.GROUPS, LIMITS)
    consumer.queue("r", "t", ENGINE, 0.0)
    longest = max(LIMITS.handshake_s, LIMITS.progress_s)
    assert consumer.tick(longest - 0.1) == []
    assert [type(action) for action in consumer.tick(longest)] == [Due]
    # The handshake succeeds late: the producer need not hold the KV.
    assert consumer.connected("engine-a", PARTNERS, longest + 1) == in_vain("", 1)[1:]


@pytest.mark.parametrize("whole", [True, False])
def test_a_producer_that_dies_ends_the_wait(whole: bool) -> None:
    consumer = queued()
    if whole:
        assert consumer.engine_lost("engine-a", "dead", 1.0)[0] == Due("r", "t", "dead")
    else:
        assert consumer.worker_lost(P1, "dead", 1.0) == [], "AwaitStart went to another rank"
        assert consumer.worker_lost(P0, "dead", 1.0)[0] == Due("r", "t", "prefill rank 0: dead", cancelled=True)
    assert empty(consumer)


def test_a_question_that_cannot_be_sent_ends_the_wait() -> None:
    consumer = queued()
    (due,) = consumer.undelivered(P0, WAITS, 0.0)
    assert due == Due("r", "t", "rank 0 of the prefill engine is unreachable", cancelled=True)
    assert empty(consumer)


def test_a_request_that_leaves_is_forgotten() -> None:
    """The producer receives a Cancel, and later messages are ignored."""
    consumer = queued()
    assert consumer.release("t", ENGINE, 1.0) == in_vain("")[1:]
    assert empty(consumer)
    assert consumer.message(P0, Starting("t"), 2.0) == []
    assert consumer.tick(100.0) == []


def test_only_the_rank_that_was_asked_is_heard() -> None:
    consumer = queued()
    assert consumer.message(P1, Starting("t"), 1.0) == []
    assert consumer.message(P0, Fin("t", 1), 1.0) == []
    assert consumer.message(P0, Cancelled("t"), 1.0) == []
    assert consumer.counts()["queued"] == 1


def test_an_id_is_for_one_request() -> None:
    """n > 1 copies a request's parameters: the second one is computed here and does not affect
    the first.
    """
    consumer = queued()
    (twin,) = consumer.queue("r2", "t", ENGINE, 0.0)
    assert isinstance(twin, Due)
    assert twin.request_id == "r2"
    assert twin.failure is not None
    (refused,) = consumer.start(order("r2"), 0.0)
    assert isinstance(refused, Received)
    assert refused.failure is not None
    assert consumer.message(P0, Starting("t"), 1.0) == [Due("r", "t", None)]


# ---- the producer --------------------------------------------------------------------------------


def awaited() -> Producer:
    """Return a machine with a queued request and its consumer's AwaitStart."""
    producer = live()
    assert producer.message(C0, WAITS, 0.0) == []
    return producer


def test_the_start_is_reported_once_and_repeated_until_there_is_an_offer() -> None:
    producer = awaited()
    assert producer.starting("r", 1.0) == [Send(C0, Starting("t"))]
    assert producer.tick(1.0 + production.LIMITS.alive_s) == [Send(C0, Starting("t"))]
    producer.message(C0, replace(offer(), number=2), 2.5)
    assert producer.tick(2.5 + production.LIMITS.alive_s) == [Send(C0, Alive("t"))]


def test_a_queued_prompt_is_alive() -> None:
    producer = awaited()
    assert producer.tick(production.LIMITS.alive_s) == [Send(C0, Alive("t"))]


@pytest.mark.parametrize("state", ["starting", "computed"])
def test_a_late_question_is_answered_at_once(state: str) -> None:
    producer = live() if state == "starting" else machine()
    if state == "computed":
        producer.expect("r", "t", 12, "digest", 0.0)
    producer.starting("r", 1.0)
    if state == "computed":
        producer.progress("r", *TABLES, 1.0)
        producer.finished("r", True, "", 2.0)
    assert producer.message(C0, WAITS, 3.0) == [Send(C0, Starting("t"))]


def test_an_early_question_is_answered_when_the_prompt_starts() -> None:
    producer = machine()
    assert producer.message(C0, WAITS, 0.0) == []
    assert producer.expect("r", "t", 12, "digest", 1.0) == []
    assert producer.starting("r", 2.0) == [Send(C0, Starting("t"))]


def test_early_questions_are_bounded() -> None:
    producer = machine()
    for number in range(MAX_EARLY + 5):
        producer.message(C0, AwaitStart(f"t{number}", number + 1), 0.0)
    assert snapshot(producer).early == {"engine-c": MAX_EARLY}


def test_a_consumer_that_leaves_the_queue_lets_the_blocks_go() -> None:
    """Both ranks cancel, and the prompt's blocks are freed after its computation."""
    producer = live((0, 1))
    producer.message(C0, WAITS, 0.0)
    assert producer.message(C0, Cancel("t", 2), 1.0) == [Send(C0, Cancelled("t"))]
    assert producer.message(C1, Cancel("t", 2), 1.0) == [Send(C1, Cancelled("t"))]
    producer.progress("r", *TABLES, 2.0)
    assert len(producer.finished("r", True, "", 3.0)) == 1
    assert not producer.busy


def test_the_lease_ends_the_wait_of_a_consumer_that_never_offers() -> None:
    producer = held()
    producer.starting("r", 2.0)
    producer.message(C0, WAITS, 3.0)
    found = producer.tick(2.0 + production.LIMITS.lease_s)
    assert Send(C0, Aborted("t", "the lease expired before an offer arrived")) in found
    assert not producer.busy


@pytest.mark.parametrize("how", ["aborted", "discarded before", "discarded", "another consumer's"])
def test_a_prompt_that_will_not_be_computed_ends_the_wait(how: str) -> None:
    producer = awaited() if how in ("aborted", "discarded") else live()
    if how == "aborted":
        found = producer.finished("r", False, "the client left", 1.0)
    elif how == "discarded":
        found = producer.discard("t", 1.0)
    elif how == "discarded before":
        producer.discard("t", 1.0)
        found = producer.message(C0, WAITS, 2.0)
    else:
        producer.message(STRANGER, WAITS, 1.0)
        found = producer.message(C0, WAITS, 2.0)
    (send,) = found
    assert isinstance(send, Send)
    assert send.peer == C0
    assert isinstance(send.message, Aborted)


def test_a_discard_of_computed_blocks_frees_them_once() -> None:
    """Regression, found by the exploration: the last delivery waited only for a start, and was
    released twice.
    """
    producer = held()
    producer.starting("r", 2.0)
    producer.message(C0, WAITS, 3.0)
    assert [type(action).__name__ for action in producer.discard("t", 4.0)] == ["Send", "Sent"]
    assert not producer.busy


def test_an_engine_that_hangs_stops_the_heartbeat_of_the_queue() -> None:
    """progress_s then ends the wait on the other side."""
    producer = awaited()
    assert producer.tick(production.LIMITS.step_s + 1.0) == []
