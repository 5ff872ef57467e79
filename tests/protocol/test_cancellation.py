"""A request cancelled in each state of both machines, alone and with a twin of the same transfer
id.

vLLM copies the parameters of a request with n > 1 to each of its answers. The first one has the
transfer. Its twin fails (decode) or has no consumer (prefill). Either may be cancelled at any time.
The exploration covers every order of a cancellation and other events; these tests state the result
for each state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from connectors.protocol.actions import ConsumerAction, Freed, ProducerAction, Received, Send, Sent, Write
from connectors.protocol.consumer import Consumer
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Aborted, Cancel, Cancelled, Fin, Peer
from tests.protocol import production
from tests.protocol.consumption import FIN0, FIN1, GROUPS, LIMITS, P0, P1, PARTNERS, empty, offered, order
from tests.protocol.production import C0, TABLES, finish_write, machine, offer, only_write
from tests.protocol.test_consumer_digests import CHECKED, with_digest

# ---- decode --------------------------------------------------------------------------------------


def connecting() -> Consumer:
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    return consumer


def half_written() -> Consumer:
    consumer = offered()
    consumer.message(P0, FIN0, 1.0)
    return consumer


def verifying() -> Consumer:
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    consumer.connected("engine-a", CHECKED, 0.0)
    consumer.message(P0, with_digest(FIN0), 1.0)
    consumer.message(P1, with_digest(FIN1), 1.0)
    return consumer


def ending() -> Consumer:
    consumer = offered()
    consumer.message(P0, Aborted("t", "the prefill request was cancelled"), 1.0)
    return consumer


def quarantined() -> Consumer:
    consumer = ending()
    consumer.tick(4.0)
    assert consumer.counts()["quarantined"] == 1
    return consumer


def received() -> Consumer:
    consumer = half_written()
    consumer.message(P1, FIN1, 1.0)
    assert empty(consumer)
    return consumer


DECODE_STATES: dict[str, tuple[Callable[[], Consumer], list[Peer], list[Peer]]] = {
    "connecting": (connecting, [], []),
    "offered": (offered, [P0, P1], []),
    "one rank done": (half_written, [P1], []),
    "verifying": (verifying, [], [P0, P1]),
    "ending": (ending, [P1], []),
    "quarantined": (quarantined, [P1], []),
    "received": (received, [], []),
}
"""Function that returns a machine in the state, its partners that may still write, and those being
verified.
"""


def given_back(actions: list[ConsumerAction]) -> list[Received | Freed]:
    """Return the actions that release blocks: the end of a request, or of its quarantine."""
    ends = [action for action in actions if isinstance(action, Received | Freed)]
    return [end for end in ends if isinstance(end, Freed) or end.quarantine is None]


@pytest.mark.parametrize("twins", [0, 1], ids=["alone", "with a twin"])
@pytest.mark.parametrize("state", DECODE_STATES)
def test_decode_is_cancelled(state: str, twins: int) -> None:
    """Blocks are released once: when no partner may write and no verification runs."""
    make, may_write, are_verified = DECODE_STATES[state]
    consumer = make()
    for _ in range(twins):
        assert [end.request_id for end in given_back(consumer.start(order("twin"), 4.0))] == ["twin"]
    cancelled = consumer.abort("r", 5.0)
    asked = [action.peer for action in cancelled if isinstance(action, Send) and isinstance(action.message, Cancel)]
    assert asked == ([] if state in ("ending", "quarantined") else may_write), (
        "a partner with a Cancel gets no second one"
    )
    ended = given_back(cancelled)
    assert bool(ended) == (state == "connecting"), "at once only if no peer knows its blocks"
    for peer in are_verified:
        ended += given_back(consumer.verified("t", peer, None, 6.0))
    for peer in may_write:
        assert not ended
        ended += given_back(consumer.message(peer, Cancelled("t"), 6.0))
    assert [end.request_id for end in ended] == ([] if state == "received" else ["r"])
    assert [isinstance(end, Freed) for end in ended] == [state == "quarantined"] * len(ended)
    assert all(end.failure for end in ended if isinstance(end, Received))
    assert empty(consumer)
    assert consumer.abort("r", 7.0) == []


@pytest.mark.parametrize("state", DECODE_STATES)
def test_a_twin_of_decode_is_cancelled(state: str) -> None:
    """The twin has no transfer: the machine's state is unchanged, and the first request ends
    normally.
    """
    make, _, are_verified = DECODE_STATES[state]
    consumer, undisturbed = make(), make()
    consumer.start(order("twin"), 4.0)
    assert consumer.abort("twin", 5.0) == []
    assert consumer.counts() == undisturbed.counts()

    def rest(machine: Consumer) -> list[ConsumerAction]:
        found = machine.connected("engine-a", PARTNERS, 6.0)
        for peer in are_verified:
            found += machine.verified("t", peer, None, 6.0)
        for peer, fin in ((P0, FIN0), (P1, FIN1)):
            found += machine.message(peer, fin, 6.0)
        return found

    ends = rest(consumer)
    assert repr(ends) == repr(rest(undisturbed))
    assert [end.request_id for end in given_back(ends)] == ([] if state == "received" else ["r"])
    assert empty(consumer)


# ---- prefill -------------------------------------------------------------------------------------


def early_transfer() -> Producer:
    producer = machine()
    assert producer.message(C0, offer(), 0.0) == []
    return producer


def queued_with_an_offer() -> Producer:
    producer = early_transfer()
    producer.expect("r", "t", 12, "digest", 0.5)
    return producer


def between_chunks() -> Producer:
    producer = queued_with_an_offer()
    write = only_write(producer.progress("r", [[1], [4]], 4, 1.0))
    assert finish_write(producer, write, 100, 1.5) == []
    return producer


def writing() -> Producer:
    producer = queued_with_an_offer()
    producer.progress("r", [[1], [4]], 4, 1.0)
    return producer


def delivered_before_its_end() -> Producer:
    producer = queued_with_an_offer()
    (done,) = finish_write(producer, only_write(producer.progress("r", *TABLES, 1.0)), 100, 1.5)
    assert isinstance(done, Send)
    assert isinstance(done.message, Fin)
    return producer


def called_off() -> Producer:
    producer = writing()
    assert producer.message(C0, Cancel("t"), 1.5) == []
    return producer


PREFILL_STATES: dict[str, tuple[Callable[[], Producer], type[object] | None]] = {
    "live, without a request of decode": (production.live, None),
    "live, asked for": (queued_with_an_offer, Aborted),
    "live, between chunks": (between_chunks, Aborted),
    "live, a write in flight": (writing, Aborted),
    "live, cancelled during a write": (called_off, Cancelled),
    "live, delivered": (delivered_before_its_end, None),
}
"""Function that returns a machine in the state, and its final message to decode; None if decode
does not wait.
"""


@pytest.mark.parametrize("twins", [0, 1], ids=["alone", "with a twin"])
@pytest.mark.parametrize("state", PREFILL_STATES)
def test_prefill_is_cancelled(state: str, twins: int) -> None:
    """Decode receives one final message, with no write in flight; only the id is remembered; the
    twin ends.
    """
    make, word = PREFILL_STATES[state]
    producer = make()
    for _ in range(twins):
        assert producer.expect("twin", "t", 12, "digest", 2.0) == []
    in_flight = producer.writes_in_flight("r")
    told = producer.finished("r", False, "the prefill request was cancelled", 3.0)
    assert not (in_flight and told), "a write in flight may still arrive in blocks that decode would free"
    for write_id in in_flight:
        told += producer.write_done(write_id, 4.0)
    assert [type(send.message) for send in told if isinstance(send, Send)] == ([word] if word else [])
    assert not [action for action in told if isinstance(action, Sent | Write)], "its blocks are vLLM's already"
    late = producer.message(C0, replace(offer(), number=1), 5.0)
    assert [type(send.message) for send in late if isinstance(send, Send)] == [Aborted]
    if twins:
        assert producer.progress("twin", *TABLES, 6.0) == []
        assert producer.finished("twin", True, "", 7.0) == [Sent("twin")]
    assert {key: number for key, number in producer.counts().items() if number} == {"remembered": 1}


@pytest.mark.parametrize("state", PREFILL_STATES)
def test_a_twin_of_prefill_is_cancelled(state: str) -> None:
    """The first request's transfer continues as if the twin did not exist."""
    make, _ = PREFILL_STATES[state]
    producer, undisturbed = make(), make()
    producer.expect("twin", "t", 12, "digest", 2.0)
    assert producer.finished("twin", False, "cancelled", 3.0) == []
    assert producer.counts() == undisturbed.counts()

    def rest(one: Producer) -> list[ProducerAction]:
        writes = list(one.writes_in_flight("r"))
        found: list[ProducerAction] = []
        for write_id in writes:
            found += one.write_done(write_id, 4.0)
        found += one.finished("r", True, "", 5.0)
        return found

    assert repr(rest(producer)) == repr(rest(undisturbed))


def test_handshakes_do_not_postpone_the_end_of_a_wait() -> None:
    """Other requests may connect to the engine repeatedly."""
    consumer = offered()
    consumer.abort("r", 1.0)
    give_up_at = 1.0 + LIMITS.cancel_s
    for at in (1.0 + 0.4 * LIMITS.cancel_s, 1.0 + 0.8 * LIMITS.cancel_s):
        assert consumer.tick(at) == []
        assert [action.message for action in consumer.connected("engine-a", PARTNERS, at) if isinstance(action, Send)]
    (received,) = [action for action in consumer.tick(give_up_at) if isinstance(action, Received)]
    assert received.quarantine == "t"


def test_an_early_transfer_is_called_off_and_its_request_cancelled() -> None:
    """Decode cancels before prefill's request has arrived; then that is cancelled: only the id
    is remembered.
    """
    producer = early_transfer()
    (answer,) = producer.message(C0, Cancel("t"), 1.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Cancelled)
    producer.expect("r", "t", 12, "digest", 2.0)
    assert producer.finished("r", False, "cancelled", 3.0) == []
    assert {key: number for key, number in producer.counts().items() if number} == {"remembered": 1}
