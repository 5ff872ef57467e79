"""Limits on what a consumer can make a producer remember; above them, the producer does not
answer.
"""

import numpy as np

from connectors.planning.blocks import BlockSet, empty_blocks
from connectors.protocol.actions import Send
from connectors.protocol.delivery import MAX_EARLY
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Aborted, Cancel, Cancelled, Offer
from testing.connector_state import snapshot
from tests.protocol.production import C0, C1, LIMITS, STRANGER, TABLES, aborted_reason, machine, offer


def wide(transfer_id: str, first: int, count: int) -> Offer:
    """Return an offer of ``count`` blocks of group 0."""
    ids = np.arange(first, first + count, dtype=np.int64)
    return Offer(transfer_id, 11, "digest", (BlockSet(np.arange(count, dtype=np.int64), ids), empty_blocks()))


def flooded() -> Producer:
    """Return a machine at its limit of transfers without a request for one engine."""
    producer = machine()
    for number in range(MAX_EARLY):
        assert producer.message(C0, Offer(f"early-{number}", 11, "digest", ()), 0.0) == []
    return producer


def test_offers_beyond_the_bound_are_neither_remembered_nor_answered() -> None:
    """Above the limit there is no answer: it would let the consumer reuse its blocks.

    A late copy of the offer could then be accepted.
    """
    producer = flooded()
    for message in (offer("one more"), Cancel("one more"), offer("one more")):
        assert producer.message(C0, message, 1.0) == []
        assert producer.message(C1, message, 1.0) == [], "the bound is the engine's, not the rank's"
    assert producer.counts()["early"] == MAX_EARLY
    assert producer.expect("r", "one more", 12, "digest", 2.0) == []
    assert producer.progress("r", *TABLES, 2.0) == [], "no offer exists for it"


def test_another_engine_does_not_suffer() -> None:
    """One engine's flood does not affect early offers of others."""
    producer = flooded()
    assert producer.message(STRANGER, offer("theirs"), 1.0) == []
    producer.expect("r", "theirs", 12, "digest", 2.0)
    assert producer.progress("r", *TABLES, 2.0) != []


def test_a_request_that_ends_makes_room_for_another() -> None:
    """Each request that arrives, is cancelled or does not arrive in time makes room for another."""
    producer = flooded()
    producer.expect("r", "early-0", 12, "digest", 1.0)
    assert producer.message(C0, offer("a"), 1.0) == []
    assert producer.message(C0, offer("b"), 1.0) == []
    assert producer.counts() | {"early": MAX_EARLY, "live": 1} == producer.counts()
    (aborted,) = producer.discard("early-1", 1.0)
    assert isinstance(aborted, Send)
    assert isinstance(aborted.message, Aborted)
    producer.message(C0, offer("b"), 1.0)
    assert producer.counts()["early"] == MAX_EARLY
    expired = producer.tick(1.0 + LIMITS.lease_s)
    assert sum(isinstance(action, Send) for action in expired) == MAX_EARLY
    assert producer.counts()["early"] == 0
    producer.message(C0, Cancel("c"), 2.0 + LIMITS.lease_s)
    assert producer.counts()["early"] == 1


def test_known_transfers_are_answered_through_a_flood() -> None:
    """The limit is for new transfers: a Cancel of a remembered one is answered."""
    producer = flooded()
    assert producer.message(C0, Cancel("early-7"), 1.0) == [Send(C0, Cancelled("early-7"))]


def test_more_blocks_on_offer_than_the_pool_has() -> None:
    """A block is in one offer at a time, so all offers together are at most the pool (100 here)."""
    producer = machine()
    assert producer.message(C0, wide("a", 1, 60), 0.0) == []
    assert aborted_reason(producer.message(C0, wide("b", 1, 60), 0.0)).startswith("the open offers have more blocks")
    assert aborted_reason(producer.message(C0, wide("b", 1, 10), 0.0)).startswith(
        "the delivery to this rank has already ended"
    )
    assert producer.message(C1, wide("a", 1, 60), 0.0) == [], "each rank has a pool of its own"
    assert producer.message(C0, Cancel("a"), 0.0) == [Send(C0, Cancelled("a"))]
    assert producer.message(C0, wide("c", 1, 100), 0.0) == [], "a cancelled offer no longer counts"


def test_what_is_closed_takes_no_room() -> None:
    """The blocks of a closed delivery no longer count, and a peer without deliveries is not
    served.
    """
    producer = machine()
    producer.message(C0, wide("a", 1, 60), 0.0)
    assert producer.serves(C0)
    producer.message(C0, Cancel("a"), 0.0)
    assert not producer.serves(C0)
    assert snapshot(producer).closed == {("a", C0)}
    assert not snapshot(producer).offers


def test_counts_return_to_nothing() -> None:
    """After any number of transfers, however they end, all counts are zero."""
    producer = flooded()
    for number in range(0, MAX_EARLY, 2):
        producer.message(C0, Cancel(f"early-{number}"), 1.0)
    producer.peer_lost(C0, 2.0)
    producer.tick(3.0 + LIMITS.lease_s)
    assert snapshot(producer).early == {}
    assert snapshot(producer).offered_blocks == {}
