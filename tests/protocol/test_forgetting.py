"""Workers that have ended: the machines remove them with Forget, and refuse late offers."""

from connectors.planning.layout import Group, GroupKind
from connectors.protocol.actions import Connect, Forget, Send, Sent
from connectors.protocol.consumer import Consumer
from connectors.protocol.limits import TransferLimits
from connectors.protocol.wire import Aborted, Cancel, Cancelled, Fin, Offer
from testing.connector_state import snapshot
from tests.protocol import test_consumer as consuming
from tests.protocol.production import (
    C0,
    C1,
    LIMITS,
    STRANGER,
    TABLES,
    aborted_reason,
    finish_write,
    held,
    live,
    machine,
    offer,
    only_write,
)

FORGET_S = TransferLimits().forget_s

FORGOTTEN = "Offer arrived after its transfer had ended and been forgotten"


def numbered(number: int, transfer_id: str = "t") -> Offer:
    """Return the offer of ``production.offer`` with a number."""
    like = offer(transfer_id)
    return Offer(like.transfer_id, like.end_token, like.prompt_digest, like.groups, number=number)


# ---- the producer --------------------------------------------------------------------------------


def test_a_silent_consumer_is_forgotten() -> None:
    """A consumer is removed forget_s after its last message; one that has sent a message stays."""
    producer = machine()
    producer.message(C1, Cancel("t"), 10.0)
    producer.tick(40.0)
    assert set(producer.tick(FORGET_S)) == {Forget(C0), Forget(STRANGER)}
    assert (producer.knows(C0), producer.knows(C1)) == (False, True)
    assert producer.tick(FORGET_S + 10) == [Forget(C1)]
    assert producer.tick(3 * FORGET_S) == []


def test_a_consumer_with_an_open_delivery_is_not_forgotten() -> None:
    """A consumer of a queued request stays, however long: it receives Alive messages."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    actions = producer.tick(2 * FORGET_S)
    assert Forget(C1) in actions
    assert Forget(C0) not in actions
    assert producer.knows(C0)


def test_a_lost_consumer_is_forgotten_when_its_writes_have_ended() -> None:
    """Forget follows the end of a write: the owner may need its connection until then."""
    producer = held()
    write = only_write(producer.message(C0, offer(), 3.0))
    producer.peer_lost(C0, 4.0)
    assert Forget(C0) not in producer.tick(5.0)
    producer.write_failed(write.write_id, "unreachable", 6.0)
    assert producer.tick(6.0) == [Forget(C0)]


def test_a_forgotten_consumer_says_hello_again() -> None:
    """A removed consumer that returns is served like a new one."""
    producer = held()
    producer.peer_lost(C0, 3.0)
    assert producer.tick(3.0) == [Forget(C0)]
    producer.welcome(C0, snapshot(machine()).consumers[C0], 4.0)
    assert finish_write(producer, only_write(producer.message(C0, offer(), 5.0)), 61, 6.0) == [
        Send(C0, Fin("t", 61)),
        Sent("r"),
    ]


def test_an_offer_that_was_called_off_is_never_taken_for_a_new_one() -> None:
    """A late offer is refused: its blocks may belong to another request, whether the id is
    remembered or not.
    """
    producer = machine()
    assert producer.message(C0, Cancel("t", 3), 0.0) == [Send(C0, Cancelled("t"))]
    for now in (20.0, 40.0):
        producer.tick(now)
    assert not any(producer.counts().values())
    assert aborted_reason(producer.message(C0, numbered(3), 50.0)) == FORGOTTEN
    assert not any(producer.counts().values())
    assert producer.message(C0, numbered(4), 50.0) == []
    assert producer.message(C1, numbered(3), 50.0) == [], "every worker numbers its own messages"


def test_an_offer_that_comes_twice_is_never_taken_for_a_new_one() -> None:
    """A second copy of a served offer is refused after its transfer has been removed."""
    producer = held()
    finish_write(producer, only_write(producer.message(C0, numbered(1), 3.0)), 61, 4.0)
    producer.tick(24.0)
    assert not any(producer.counts().values())
    producer.expect("r2", "t", 12, "digest", 25.0)
    producer.progress("r2", *TABLES, 26.0)
    assert aborted_reason(producer.message(C0, numbered(1), 27.0)) == FORGOTTEN


# ---- the consumer --------------------------------------------------------------------------------


def test_an_engine_that_is_not_used_is_forgotten_first() -> None:
    """A producer engine is removed after half of forget_s: before that engine removes this
    consumer.
    """
    consumer = consuming.offered()
    consumer.message(consuming.P0, consuming.FIN0, 1.0)
    consumer.message(consuming.P1, consuming.FIN1, 1.0)
    assert (consumer.tick(FORGET_S / 2 - 1), consumer.knows(consuming.P0)) == ([], True)
    assert consumer.tick(FORGET_S / 2) == [Forget(consuming.P0), Forget(consuming.P1)]
    assert not consumer.knows(consuming.P0)
    assert consumer.start(consuming.order("r2", "t2"), FORGET_S) == [Connect(consuming.ENGINE)]


def test_an_engine_that_owes_an_answer_is_not_forgotten() -> None:
    """Only the engine's answer ends a quarantine, so an engine with blocks in quarantine stays."""
    consumer = consuming.offered()
    consumer.abort("r", 0.0)
    assert Connect(consuming.ENGINE) in consumer.tick(FORGET_S)
    assert consumer.knows(consuming.P0)


def test_a_new_handshake_asks_again() -> None:
    """ENDING + connected: a producer that had removed this consumer can answer now."""
    consumer = consuming.offered()
    consumer.abort("r", 0.0)
    consumer.message(consuming.P0, Cancelled("t"), 0.5)
    assert consumer.connected("engine-a", consuming.PARTNERS, 3.0) == consuming.cancels(consuming.P1)


def test_numbers_ascend() -> None:
    """One series numbers offers and releases; a Cancel has the number of the offer that it
    cancels.
    """
    consumer = Consumer((Group(0, GroupKind.FULL, 4, None, ()), Group(1, GroupKind.FULL, 4, None, ())), LIMITS)
    consumer.connected("engine-a", consuming.PARTNERS, 0.0)
    first = consumer.start(consuming.order("r1", "t1"), 0.0)
    second = consumer.release("t2", consuming.ENGINE, 0.0)
    third = consumer.start(consuming.order("r3", "t3"), 0.0)
    messages = [send.message for send in consuming.sends([*first, *second, *third])]
    assert [one.number for one in messages if isinstance(one, Offer | Cancel)] == [1, 1, 2, 2, 3, 3]
    assert [send.message for send in consuming.sends(consumer.abort("r1", 1.0))] == [Cancel("t1", 1)] * 2


# ---- writes that hang ----------------------------------------------------------------------------


def test_the_blocks_of_a_write_that_hangs_wait_for_its_end() -> None:
    """OPEN + hang_s without progress -> abandoned; Aborted and Sent only when the write has
    ended.
    """
    producer = held()
    write = only_write(producer.message(C0, offer(), 3.0))
    assert producer.tick(3.0 + LIMITS.hang_s - 0.1) == []
    assert producer.counts()["hanging"] == 0
    assert producer.tick(3.0 + LIMITS.hang_s) == []
    assert producer.counts()["hanging"] == 1
    for later in (60.0, 600.0):
        assert Sent("r") not in producer.tick(later)
    answer, sent = producer.write_refused(write.write_id, "aborted", 700.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Aborted)
    assert "no progress for 20 s" in answer.message.reason
    assert (sent, producer.counts()["hanging"]) == (Sent("r"), 0)


def test_a_write_that_ends_well_after_all_is_given_up() -> None:
    """A hanging write that ends late still causes Aborted and Sent, after its consumer's
    deadline.
    """
    producer = held()
    write = only_write(producer.message(C0, offer(), 3.0))
    producer.tick(3.0 + LIMITS.hang_s)
    answer, sent = finish_write(producer, write, 61, 50.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Aborted)
    assert sent == Sent("r")


def test_a_write_of_a_request_that_has_ended_counts_too() -> None:
    """After the end of its transfer, only the hanging write refers to it."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    write = only_write(producer.progress("r", *TABLES, 1.0))
    producer.finished("r", False, "the client left", 2.0)
    producer.tick(1.0 + LIMITS.hang_s)
    assert producer.counts()["hanging"] == 1
    answer = aborted_reason(producer.write_refused(write.write_id, "unreachable", 99.0))
    assert (answer, producer.counts()["hanging"]) == ("the client left", 0)
