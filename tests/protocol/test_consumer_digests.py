"""The consumer's machine with digests of the received bytes."""

from dataclasses import replace

import numpy as np

from connectors.protocol.actions import Forget, Freed, Received, Verify
from connectors.protocol.consumer import Consumer
from connectors.protocol.wire import Alive, Cancelled, Fin, Peer
from tests.campaigns.schedules.tally import Tally
from tests.protocol.consumption import (
    FIN0,
    FIN1,
    GROUPS,
    LIMITS,
    P0,
    P1,
    PARTNERS,
    cancels,
    empty,
    offers,
    order,
)

CHECKED = tuple(replace(partner, new_digest=Tally) for partner in PARTNERS)


def tallied(*groups: list[int]) -> str:
    tally = Tally()
    for group, ids in enumerate(groups):
        tally.add(group, np.array(ids, np.int64), np.zeros(len(ids), np.int64))
    return tally.hexdigest()


def with_digest(fin: Fin, digest: str = tallied([4, 5, 6], [7])) -> Fin:
    return replace(fin, digest=digest)


def checked() -> Consumer:
    """Return a machine that has requested digests in its offers to both partners."""
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    found = offers(consumer.connected("engine-a", CHECKED, 0.0))
    assert [offer.digest for offer in found] == [True, True]
    return consumer


def verify(consumer: Consumer, peer: Peer, fin: Fin) -> Verify:
    (action,) = consumer.message(peer, fin, 1.0)
    assert isinstance(action, Verify)
    assert (action.transfer_id, action.peer) == ("t", peer)
    return action


def test_nobody_is_asked_for_a_digest_that_is_not_wanted() -> None:
    """Integrity off: Offers request no digest, and a received one is ignored."""
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    assert [offer.digest for offer in offers(consumer.connected("engine-a", PARTNERS, 0.0))] == [False, False]
    consumer.message(P0, with_digest(FIN0, "f" * 32), 1.0)
    assert consumer.message(P1, FIN1, 1.0) == [Received("r", None)]


def test_every_partner_is_verified_before_the_request_runs() -> None:
    """OFFERED + Fin -> Verify over the units of its order; Received(ok) at the last good result
    only.
    """
    consumer = checked()
    first, second = (verify(consumer, peer, with_digest(fin)) for peer, fin in ((P0, FIN0), (P1, FIN1)))
    assert [units.dst_ids.tolist() for units in first.units] == [[4, 5, 6], [7]]
    assert (first.problem(), second.problem()) == (None, None)
    assert consumer.verified("t", P1, None, 2.0) == []
    assert consumer.verified("t", P0, None, 2.0) == [Received("r", None)]
    assert empty(consumer)


def test_another_digest_is_a_problem() -> None:
    """Verify describes the difference."""
    action = verify(checked(), P0, with_digest(FIN0, tallied([4, 6, 5], [7])))
    assert "the received bytes differ from the bytes sent" in (action.problem() or "")


def test_a_wrong_digest_is_never_decoded_from() -> None:
    """OFFERED + wrong digest -> ENDING, Cancel to partners that may write; the failure names the
    rank.
    """
    consumer = checked()
    verify(consumer, P1, with_digest(FIN1))
    assert consumer.verified("t", P1, "other bytes", 2.0) == cancels(P0)
    assert consumer.message(P0, Cancelled("t"), 3.0) == [Received("r", "prefill rank 1: other bytes")]
    assert empty(consumer)


def test_a_missing_digest_is_a_failure() -> None:
    """A Fin without the requested digest fails the transfer."""
    consumer = checked()
    assert consumer.message(P0, FIN0, 1.0) == cancels(P1)
    assert consumer.message(P1, Cancelled("t"), 1.0) == [
        Received("r", "prefill rank 0 sent no digest of the bytes that it wrote")
    ]


def test_a_wrong_count_needs_no_digest() -> None:
    """The byte count is checked before the digest."""
    consumer = checked()
    assert consumer.message(P0, with_digest(Fin("t", 30)), 1.0) == cancels(P1)


def test_blocks_are_kept_while_they_are_verified() -> None:
    """OFFERED + abort during a verification -> ENDING; Received(failed) at its result, even a
    good one.
    """
    consumer = checked()
    verify(consumer, P0, with_digest(FIN0))
    verify(consumer, P1, with_digest(FIN1))
    assert consumer.abort("r", 2.0) == []
    assert consumer.tick(1.0 + LIMITS.hang_s - 0.1) == []
    assert consumer.counts()["quarantined"] == 0
    assert consumer.verified("t", P0, None, 51.0) == []
    assert consumer.verified("t", P1, "other bytes", 51.0) == [Received("r", "the request was aborted")]
    assert empty(consumer)


def test_a_verification_is_not_silence() -> None:
    """A partner that has sent its Fin owes no message, and may die."""
    consumer = checked()
    verify(consumer, P0, with_digest(FIN0))
    verify(consumer, P1, with_digest(FIN1))
    assert consumer.tick(1.0 + LIMITS.hang_s - 0.1) == []
    assert consumer.engine_lost("engine-a", "it is gone", 101.0) == [Forget(P0), Forget(P1)]
    consumer.verified("t", P0, None, 102.0)
    assert consumer.verified("t", P1, None, 102.0) == [Received("r", None)]


def test_a_failed_transfer_is_not_verified() -> None:
    """ENDING + Fin: the request has already failed."""
    consumer = checked()
    consumer.abort("r", 1.0)
    assert consumer.message(P0, with_digest(FIN0), 2.0) == []
    assert consumer.message(P1, FIN1, 2.0) == [Received("r", "the request was aborted")]


def test_a_dead_engine_during_a_verification() -> None:
    """One rank in verification, the other dead: the failure waits for the result."""
    consumer = checked()
    verify(consumer, P0, with_digest(FIN0))
    assert consumer.engine_lost("engine-a", "it is gone", 2.0) == [Forget(P0), Forget(P1)]
    assert consumer.verified("t", P0, None, 3.0) == [Received("r", "it is gone")]
    assert empty(consumer)


def test_a_verification_that_hangs_fails_the_transfer() -> None:
    """OFFERED -> Received(failed) after hang_s; a late result has no effect."""
    consumer = checked()
    verify(consumer, P0, with_digest(FIN0))
    verify(consumer, P1, with_digest(FIN1))
    assert consumer.verified("t", P0, None, 2.0) == []
    (received,) = consumer.tick(1.0 + LIMITS.hang_s)
    assert received == Received("r", f"the comparison of digests took longer than {LIMITS.hang_s:g} s")
    assert empty(consumer)
    assert consumer.verified("t", P1, None, 200.0) == []


def test_the_wait_of_an_aborted_request_ends_if_its_verification_hangs() -> None:
    """ENDING -> Received(failed), with the first failure; another rank's Cancel comes first."""
    consumer = checked()
    verify(consumer, P0, with_digest(FIN0))
    assert consumer.abort("r", 2.0) == cancels(P1)
    assert consumer.message(P1, Cancelled("t"), 3.0) == []
    assert consumer.tick(1.0 + LIMITS.hang_s - 0.1) == []
    assert consumer.tick(1.0 + LIMITS.hang_s) == [Received("r", "the request was aborted")]
    assert empty(consumer)


def test_blocks_in_quarantine_are_freed_if_a_verification_hangs() -> None:
    """QUARANTINE -> Freed after hang_s, once no rank may write."""
    consumer = checked()
    verify(consumer, P0, with_digest(FIN0))
    consumer.abort("r", 2.0)
    found = consumer.tick(2.0 + LIMITS.cancel_s)
    assert Received("r", "the request was aborted", quarantine="t") in found
    assert consumer.message(P1, Cancelled("t"), 10.0) == []
    assert consumer.tick(1.0 + LIMITS.hang_s) == [Freed("r", "t")]
    assert empty(consumer)


def test_an_exception_ends_the_wait() -> None:
    """A Fin that cannot be verified fails the reception: its sender sends no other message."""

    def no_memory() -> Tally:
        raise MemoryError("no memory")

    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    consumer.connected("engine-a", [replace(partner, new_digest=no_memory) for partner in PARTNERS], 0.0)
    assert consumer.message(P1, with_digest(FIN1), 1.0) == cancels(P0)
    (received,) = consumer.message(P0, Cancelled("t"), 1.5)
    assert isinstance(received, Received)
    assert "prefill rank 1: MemoryError('no memory')" in str(received.failure)
    assert empty(consumer)


def test_what_has_arrived_is_hashed_while_the_rest_arrives() -> None:
    """OFFERED + Alive with units -> Verify of the new ones, whatever is lost, repeated or late; Fin
    -> Verify of the rest, and only all results together release the request.
    """
    consumer = checked()
    found: list[Verify] = []
    for left in ((2, 1), (3, 1), (1, 1), (2, 1), (1, 1)):
        for action in consumer.message(P0, Alive("t", left), 1.0):
            assert isinstance(action, Verify)
            found.append(action)
    found.append(verify(consumer, P0, with_digest(FIN0)))
    assert [[units.dst_ids.tolist() for units in each.units] for each in found] == [
        [[4], []],
        [[5], []],
        [[6], [7]],
    ]
    assert [each.problem() for each in found] == [None, None, None]
    other = verify(consumer, P1, with_digest(FIN1))
    assert other.problem() is None
    for each in (*found[:2], other):
        assert consumer.verified("t", each.peer, None, 2.0) == []
    assert consumer.verified("t", P0, None, 2.0) == [Received("r", None)]
    assert empty(consumer)


def test_damage_of_what_arrived_early_is_found_at_the_end() -> None:
    """The digest goes on over all Verify actions of a partner."""
    consumer = checked()
    (first,) = consumer.message(P0, Alive("t", (1, 1)), 1.0)
    assert isinstance(first, Verify)
    assert first.problem() is None
    last = verify(consumer, P0, with_digest(FIN0, tallied([5, 4, 6], [7])))
    assert "the received bytes differ from the bytes sent" in (last.problem() or "")


def test_blocks_are_kept_while_what_arrived_early_is_hashed() -> None:
    """ENDING waits for each running Verify."""
    consumer = checked()
    assert len(consumer.message(P0, Alive("t", (1, 1)), 1.0)) == 1
    assert consumer.abort("r", 1.5) == cancels(P0, P1)
    for peer in (P0, P1):
        assert consumer.message(peer, Cancelled("t"), 2.0) == []
    assert consumer.verified("t", P0, None, 3.0) == [Received("r", "the request was aborted")]


def test_counts_of_another_number_of_groups_are_ignored() -> None:
    """As an Alive without counts, and one without a requested digest."""
    consumer = checked()
    for left in ((), (0,), (0, 0, 0)):
        assert consumer.message(P0, Alive("t", left), 1.0) == []
    unchecked = Consumer(GROUPS, LIMITS)
    unchecked.start(order(), 0.0)
    unchecked.connected("engine-a", PARTNERS, 0.0)
    assert unchecked.message(P0, Alive("t", (0, 0)), 1.0) == []
