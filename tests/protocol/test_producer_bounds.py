"""What a consumer can make a producer remember is bounded, and what it may not remember it does not answer."""

import numpy as np

from connectors.planning.blocks import BlockSet, empty_blocks
from connectors.protocol.actions import Send
from connectors.protocol.delivery import MAX_EARLY
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Aborted, Cancel, Cancelled, Offer
from tests.protocol.production import C0, C1, LIMITS, STRANGER, TABLES, aborted_reason, machine, offer


def wide(transfer_id: str, first: int, count: int) -> Offer:
    """An offer of ``count`` blocks of group 0."""
    ids = np.arange(first, first + count, dtype=np.int64)
    return Offer(transfer_id, 11, "digest", (BlockSet(np.arange(count, dtype=np.int64), ids), empty_blocks()))


def flooded() -> Producer:
    """A machine that has heard of as many transfers without a request as it remembers for one engine."""
    producer = machine()
    for number in range(MAX_EARLY):
        assert producer.message(C0, Offer(f"early-{number}", 11, "digest", ()), 0.0) == []
    return producer


def test_offers_beyond_the_bound_are_neither_remembered_nor_answered() -> None:
    """An answer would be the licence to reuse the blocks, and a copy of the offer could still come true."""
    producer = flooded()
    for message in (offer("one more"), Cancel("one more"), offer("one more")):
        assert producer.message(C0, message, 1.0) == []
        assert producer.message(C1, message, 1.0) == [], "the bound is the engine's, not the rank's"
    assert producer.counts()["early"] == MAX_EARLY
    assert producer.expect("r", "one more", 12, "digest", 2.0) == []
    assert producer.progress("r", *TABLES, 2.0) == [], "nobody has offered for it"


def test_another_engine_does_not_suffer() -> None:
    """One engine's flood leaves the others' early offers alone."""
    producer = flooded()
    assert producer.message(STRANGER, offer("theirs"), 1.0) == []
    producer.expect("r", "theirs", 12, "digest", 2.0)
    assert producer.progress("r", *TABLES, 2.0) != []


def test_places_come_back_when_requests_come() -> None:
    """Each request that comes, is given up or does not come in time makes room for one."""
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
    """The bound is for what is new: a Cancel of what is remembered is answered."""
    producer = flooded()
    assert producer.message(C0, Cancel("early-7"), 1.0) == [Send(C0, Cancelled("early-7"))]


def test_more_blocks_on_offer_than_the_pool_has() -> None:
    """A block is on offer once at a time, so all of them together are at most the pool (100 here)."""
    producer = machine()
    assert producer.message(C0, wide("a", 1, 60), 0.0) == []
    assert aborted_reason(producer.message(C0, wide("b", 1, 60), 0.0)).startswith("the open offers have more blocks")
    assert aborted_reason(producer.message(C0, wide("b", 1, 10), 0.0)).startswith(
        "this transfer has already had an offer"
    )
    assert producer.message(C1, wide("a", 1, 60), 0.0) == [], "each rank has a pool of its own"
    assert producer.message(C0, Cancel("a"), 0.0) == [Send(C0, Cancelled("a"))]
    assert producer.message(C0, wide("c", 1, 100), 0.0) == [], "what was cancelled is on offer no longer"


def test_what_is_closed_takes_no_room() -> None:
    """The blocks of a closed delivery are forgotten, and a peer that nothing is owed to is not served."""
    producer = machine()
    producer.message(C0, wide("a", 1, 60), 0.0)
    assert producer.serves(C0)
    producer.message(C0, Cancel("a"), 0.0)
    assert not producer.serves(C0)
    assert producer.snapshot().closed == {("a", C0)}
    assert not producer.snapshot().offers


def test_counts_return_to_nothing() -> None:
    """After any number of transfers, however they end, nothing is counted."""
    producer = flooded()
    for number in range(0, MAX_EARLY, 2):
        producer.message(C0, Cancel(f"early-{number}"), 1.0)
    producer.peer_lost(C0, 2.0)
    producer.tick(3.0 + LIMITS.lease_s)
    assert producer.snapshot().early == {}
    assert producer.snapshot().offered_blocks == {}
