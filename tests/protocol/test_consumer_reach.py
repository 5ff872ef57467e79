"""Producer engines that a consumer's machine awaits, considers unreachable, and removes."""

from connectors.protocol.actions import Connect, Forget, Received, Send
from connectors.protocol.consumer import Consumer
from connectors.protocol.wire import Cancel, Cancelled, Fin, Peer
from tests.protocol.consumption import (
    ENGINE,
    FIN0,
    FIN1,
    GROUPS,
    LIMITS,
    OTHER,
    P0,
    P1,
    PARTNERS,
    offered,
    order,
    sends,
)

# ---- engines that may be removed -----------------------------------------------------------------


def test_whose_answers_are_awaited() -> None:
    """An engine is awaited from Connect to a partner's last message; then it may be
    removed and can connect again.
    """
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    assert consumer.awaits(P0)
    assert not consumer.awaits(Peer(OTHER.incarnation, 0))
    consumer = offered()
    consumer.abort("r", 0.0)
    consumer.message(P0, Cancelled("t"), 1.0)
    assert (consumer.awaits(P0), consumer.awaits(P1)) == (False, True)
    consumer.message(P1, Cancelled("t"), 1.0)
    assert not consumer.awaits(P1)
    assert consumer.forget(ENGINE.incarnation) == [Forget(P0), Forget(P1)]
    assert consumer.release("another", ENGINE, 2.0) == [Connect(ENGINE)]
    assert consumer.awaits(P0), "a release waits for the handshake"
    consumer.connected(ENGINE.incarnation, PARTNERS, 3.0)
    assert not consumer.awaits(P0)


def test_a_rank_that_the_owner_drops_amid_a_transfer() -> None:
    """The other rank is still awaited, so no engine is removed; the next request sends Hello to
    all ranks.
    """
    consumer = offered()
    consumer.message(P0, FIN0, 1.0)
    assert consumer.forget(ENGINE.incarnation) == []
    assert consumer.start(order("r2", "t2"), 2.0) == [Connect(ENGINE)]
    assert consumer.message(P1, FIN1, 3.0) == [Received("r", None)]
    assert [send.peer for send in sends(consumer.connected(ENGINE.incarnation, PARTNERS, 4.0))] == [P0, P1]


# ---- unreachable engines -------------------------------------------------------------------------


def test_an_offer_that_cannot_be_sent() -> None:
    """OFFERED + undelivered -> ENDING: that rank cannot write. The next request starts a
    handshake.
    """
    consumer = offered()
    offer = consumer.start(order("r2", "t2"), 1.0)[0]
    assert isinstance(offer, Send)
    assert consumer.undelivered(P0, offer.message, 1.0) == [Send(P1, Cancel("t2", 2))]
    reason = "rank 0 of the prefill engine is unreachable"
    assert consumer.message(P1, Cancelled("t2"), 2.0) == [Received("r2", reason)]
    assert consumer.start(order("r3", "t3"), 3.0) == [Connect(ENGINE)]
    assert consumer.release("t4", ENGINE, 3.0) == [Connect(ENGINE)]
    assert consumer.connect_failed(ENGINE.incarnation, "no", 4.0) == [Received("r3", "no")]
    assert consumer.start(order("r5", "t5"), 5.0) == [Connect(ENGINE)]
    assert [send.peer for send in sends(consumer.connected(ENGINE.incarnation, PARTNERS, 6.0)[:2])] == [P0, P1]
    assert [type(action) for action in consumer.start(order("r6", "t6"), 7.0)] == [Send, Send]


def test_an_engine_out_of_reach_is_forgotten_like_others() -> None:
    """The engine's ranks stay known until the owner has been told once to remove each."""
    consumer = offered()
    consumer.message(P0, FIN0, 1.0)
    consumer.message(P1, FIN1, 1.0)
    (release, _) = sends(consumer.release("t2", ENGINE, 1.0))
    consumer.undelivered(P0, release.message, 1.0)
    assert (consumer.knows(P0), consumer.knows(P1)) == (True, True)
    assert consumer.tick(1.0 + LIMITS.forget_s / 2) == [Forget(P0), Forget(P1)]
    assert not consumer.knows(P0)


def test_what_a_producer_could_not_send_is_no_doubt() -> None:
    """The worker is a producer as well; its answers concern its own consumers."""
    consumer = offered()
    assert consumer.undelivered(P0, Fin("t9", 1), 1.0) == []
    assert [type(action) for action in consumer.start(order("r2", "t2"), 2.0)] == [Send, Send]
