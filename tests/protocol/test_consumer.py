"""The consumer's machine, row by row of the table in its docstring."""

from dataclasses import replace

import pytest

from connectors.planning.blocks import UnitShape, empty_blocks
from connectors.protocol.actions import Connect, Forget, Freed, Received, Send
from connectors.protocol.consumer import Consumer
from connectors.protocol.engines import Partner
from connectors.protocol.params import EngineAddress
from connectors.protocol.reception import Order, expected_bytes
from connectors.protocol.wire import Aborted, Alive, Cancel, Cancelled, Failed, Fin, Peer, Welcome
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
    SHAPES,
    blocks,
    cancels,
    empty,
    failures,
    offered,
    offers,
    order,
    sends,
)

# ---- (none), CONNECTING --------------------------------------------------------------------------


def test_start_connects_first() -> None:
    """(none) + start -> CONNECTING, Connect."""
    consumer = Consumer(GROUPS, LIMITS)
    assert consumer.start(order(), 0.0) == [Connect(ENGINE)]
    assert consumer.counts()["connecting"] == 1


def test_connected_offers_to_every_partner() -> None:
    """CONNECTING + connected -> OFFERED, an Offer to each partner rank, with the order's blocks."""
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    actions = consumer.connected("engine-a", PARTNERS, 1.0)
    assert [send.peer for send in sends(actions)] == [P0, P1]
    for offer in offers(actions):
        assert (offer.transfer_id, offer.end_token, offer.prompt_digest) == ("t", 9, "digest")
        assert [group.ids.tolist() for group in offer.groups] == [[4, 5, 6], [7]]
    assert consumer.counts()["offered"] == 1


def test_a_known_engine_is_offered_at_once() -> None:
    """One handshake serves all requests of an engine start."""
    consumer = offered()
    assert [send.peer for send in sends(consumer.start(order("r2", "t2"), 1.0))] == [P0, P1]


def test_connected_to_another_engine_changes_nothing() -> None:
    """Only the transfers of that engine start continue."""
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    assert consumer.connected("engine-b", PARTNERS, 1.0) == []
    assert consumer.counts()["connecting"] == 1


def test_connect_failed_ends_at_once() -> None:
    """CONNECTING + connect_failed -> gone, Received(failed): no peer knows the blocks."""
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    assert consumer.connect_failed("engine-a", "dtype differs", 1.0) == [Received("r", "dtype differs")]
    assert empty(consumer)
    assert consumer.start(order("r2", "t2"), 2.0) == [Connect(ENGINE)]


def test_connecting_ends_by_itself() -> None:
    """CONNECTING + the longer of handshake_s and progress_s -> gone, Received(failed)."""
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    assert consumer.tick(9.9) == []
    assert failures(consumer.tick(10.0)) == {"r": "a prefill rank sent no message about the transfer for 10 s"}
    assert empty(consumer)


# ---- OFFERED -------------------------------------------------------------------------------------


def test_all_fins_end_well() -> None:
    """OFFERED + Fin from all, right counts -> gone, Received(ok), after the last one only."""
    consumer = offered()
    assert consumer.message(P1, FIN1, 1.0) == []
    assert consumer.message(P0, FIN0, 2.0) == [Received("r", None)]
    assert empty(consumer)


def test_a_fin_counts_once() -> None:
    """A duplicate of one rank's Fin does not replace another rank's."""
    consumer = offered()
    consumer.message(P1, FIN1, 1.0)
    assert consumer.message(P1, FIN1, 1.0) == []
    assert consumer.counts()["offered"] == 1


@pytest.mark.parametrize("count", [0, 30, 32, 60])
def test_a_wrong_count_is_never_decoded_from(count: int) -> None:
    """OFFERED + wrong count -> ENDING, Cancel to partners that may write; Received(failed) at
    their answer.
    """
    consumer = offered()
    assert consumer.message(P0, Fin("t", count), 1.0) == cancels(P1)
    assert consumer.message(P1, FIN1, 1.0) == [Received("r", f"prefill rank 0 wrote {count} bytes, expected 31")]


def test_a_wrong_last_count_ends_at_once() -> None:
    """If no other partner may write, the failure ends the reception."""
    consumer = offered()
    consumer.message(P0, FIN0, 1.0)
    assert consumer.message(P1, Fin("t", 59), 1.0) == [Received("r", "prefill rank 1 wrote 59 bytes, expected 60")]


def test_aborted_cancels_the_others() -> None:
    """OFFERED + Aborted -> ENDING, Cancel to exactly the partners that may still write."""
    consumer = offered()
    assert consumer.message(P0, Aborted("t", "preempted"), 1.0) == cancels(P1)
    assert consumer.message(P1, Cancelled("t"), 1.0) == [Received("r", "prefill rank 0: preempted")]


def test_cancelled_without_being_asked_is_a_failure() -> None:
    """OFFERED + Cancelled: another request has cancelled the transfer, so it is incomplete."""
    consumer = offered()
    assert consumer.message(P0, Cancelled("t"), 1.0) == cancels(P1)
    assert consumer.message(P1, FIN1, 1.0) == [Received("r", "prefill rank 0: the producer cancelled the transfer")]


def test_abort_waits_for_the_partners() -> None:
    """OFFERED + abort -> ENDING, Cancel; blocks are released when all have answered, in any way."""
    consumer = offered()
    assert consumer.abort("r", 1.0) == cancels(P0, P1)
    assert consumer.message(P0, FIN0, 2.0) == []
    assert consumer.message(P1, Aborted("t", "expired"), 2.0) == [Received("r", "the request was aborted")]
    assert empty(consumer)


def test_abort_twice_cancels_once() -> None:
    """A second abort, or an abort of a request that has ended, has no effect."""
    consumer = offered()
    consumer.abort("r", 1.0)
    assert consumer.abort("r", 1.0) == []
    assert consumer.abort("unknown", 1.0) == []


def test_silence_is_a_failure() -> None:
    """OFFERED + progress_s without a message -> ENDING, Cancel."""
    consumer = offered()
    assert consumer.tick(9.9) == []
    assert consumer.tick(10.0) == cancels(P0, P1)
    consumer.message(P0, Cancelled("t"), 10.5)
    assert consumer.message(P1, Cancelled("t"), 10.5) == [
        Received("r", "a prefill rank sent no message about the transfer for 10 s"),
    ]


def test_alive_is_a_word() -> None:
    """Alive postpones the deadline, as any message of a partner does."""
    consumer = offered()
    for now in (9.0, 18.0, 27.0):
        assert [consumer.message(peer, Alive("t"), now) for peer in (P0, P1)] == [[], []]
        assert consumer.tick(now + 9.9) == []
    assert consumer.tick(37.0) == cancels(P0, P1)


def test_no_rank_speaks_for_another() -> None:
    """If one of two ranks is stopped, the other's Alive messages do not extend the wait."""
    consumer = offered()
    for now in range(1, 10):
        assert consumer.message(P0, Alive("t"), float(now)) == []
        assert consumer.tick(float(now)) == []
    assert consumer.tick(10.0) == cancels(P0, P1)


def test_alive_of_a_finished_partner_does_not_count() -> None:
    """Only partners that may still write can extend a reception's wait."""
    consumer = offered()
    consumer.message(P0, FIN0, 1.0)
    consumer.message(P0, Alive("t"), 9.0)
    assert consumer.tick(11.0) == cancels(P1)


# ---- ENDING --------------------------------------------------------------------------------------


ABORTED = "the request was aborted"
QUARANTINED = Received("r", ABORTED, quarantine="t")


def test_a_request_does_not_wait_for_an_answer() -> None:
    """ENDING + cancel_s -> QUARANTINE, Received(quarantine), Cancel; another Cancel every
    cancel_s.
    """
    consumer = offered()
    consumer.abort("r", 0.0)
    consumer.message(P0, Cancelled("t"), 0.5)
    assert (consumer.tick(1.9), consumer.counts()["quarantined"]) == ([], 0)
    assert consumer.tick(2.0) == [*cancels(P1), Connect(ENGINE), QUARANTINED]
    assert (consumer.counts()["quarantined"], {each.peer for each in consumer.suspects()}) == (1, {P1})
    assert (consumer.awaits(P0), consumer.awaits(P1)) == (False, True)
    assert (consumer.tick(3.9), consumer.tick(4.0)) == ([], [*cancels(P1), Connect(ENGINE)])
    assert consumer.message(P1, Cancelled("t"), 4.1) == [Freed("r", "t")]
    assert empty(consumer)


def test_no_deadline_frees_blocks_that_may_be_written() -> None:
    """QUARANTINE lasts until every partner has answered or is dead: no deadline releases blocks."""
    consumer = offered()
    consumer.abort("r", 0.0)
    assert QUARANTINED in consumer.tick(2.0)
    for now in range(3, 2000, 7):
        assert all(isinstance(action, Send | Connect) for action in consumer.tick(float(now)))
    assert consumer.engine_lost("engine-a", "no process answers", 2000.0) == [Freed("r", "t"), Forget(P0), Forget(P1)]
    assert empty(consumer)


def test_quarantine_of_one_rank() -> None:
    """QUARANTINE + a right Fin of one: the other may still write, and the request has already
    failed.
    """
    consumer = offered()
    consumer.abort("r", 0.0)
    consumer.tick(2.0)
    assert consumer.message(P0, FIN0, 2.5) == []
    assert consumer.connected("engine-a", PARTNERS, 3.0) == cancels(P1)
    assert consumer.message(P1, Aborted("t", "expired"), 3.5) == [Freed("r", "t")]


def test_a_request_in_quarantine_is_over() -> None:
    """An abort in quarantine has no effect; another request may have the id."""
    consumer = offered()
    consumer.abort("r", 0.0)
    consumer.tick(2.0)
    assert consumer.abort("r", 2.5) == []
    consumer.start(order("r", "t2"), 3.0)
    consumer.connected("engine-a", PARTNERS, 3.0)
    assert (consumer.counts()["offered"], consumer.counts()["quarantined"]) == (1, 1)
    assert consumer.message(P0, Cancelled("t"), 3.5) == []
    assert consumer.message(P1, Cancelled("t"), 3.5) == [Freed("r", "t")]
    assert consumer.message(P0, Fin("t2", 31), 4.0) == []
    assert consumer.message(P1, Fin("t2", 60), 4.0) == [Received("r", None)]


def test_blocks_are_not_offered_to_an_engine_that_does_not_answer() -> None:
    """start, while another request's blocks are in quarantine -> CONNECTING: no peer knows its
    blocks.
    """
    consumer = offered()
    consumer.abort("r", 0.0)
    consumer.tick(2.0)
    assert consumer.start(order("r2", "t2"), 3.0) == [Connect(ENGINE)]
    assert consumer.connect_failed("engine-a", "no answer", 4.0) == [Received("r2", "no answer")]
    assert consumer.start(order("r3", "t3"), 5.0) == [Connect(ENGINE)]


def test_a_transfer_in_quarantine_keeps_its_id() -> None:
    """The id of a transfer in quarantine stays used: its Fin must not match another request."""
    consumer = offered()
    consumer.abort("r", 0.0)
    for now in (2.0, 30.0, 60.0):
        consumer.tick(now)
    (refused,) = consumer.start(order("r2", "t"), 61.0)
    assert isinstance(refused, Received)
    assert (refused.failure is None, refused.quarantine) == (False, None)


def test_alive_does_not_end_anything() -> None:
    """ENDING + Alive: the partner may still write."""
    consumer = offered()
    consumer.abort("r", 0.0)
    assert consumer.message(P0, Alive("t"), 1.0) == []
    assert consumer.tick(2.0) == [*cancels(P0, P1), Connect(ENGINE), QUARANTINED]


def test_the_first_failure_is_reported() -> None:
    """The first failure is reported; later ones are its consequences."""
    consumer = offered()
    consumer.message(P0, Fin("t", 1), 1.0)
    consumer.abort("r", 1.0)
    assert "prefill rank 0 wrote 1 bytes" in failures(consumer.message(P1, Fin("t", 2), 1.0))["r"]


# ---- engine_lost, unknown peers, release ---------------------------------------------------------


def test_a_dead_engine_writes_no_more() -> None:
    """engine_lost ends receptions of that engine start in every stage; its next request connects
    again.
    """
    consumer = offered(order("r1", "t1"), order("r2", "t2"))
    consumer.start(order("r3", "t3", OTHER), 0.0)
    consumer.abort("r1", 1.0)
    assert failures(consumer.engine_lost("engine-a", "it is gone", 2.0)) == {
        "r1": "the request was aborted",
        "r2": "it is gone",
    }
    assert failures(consumer.engine_lost("engine-b", "it is gone too", 2.0)) == {"r3": "it is gone too"}
    assert empty(consumer)
    assert consumer.start(order("r4", "t4"), 3.0) == [Connect(ENGINE)]


def test_all_engines_that_could_be_lost_are_known() -> None:
    """Known engines are those with a handshake, with a waiting request, or with only a pending
    release.
    """
    consumer = offered()
    consumer.start(order("r2", "t2", OTHER), 1.0)
    consumer.release("t3", EngineAddress("engine-c", "host", 1), 1.0)
    assert consumer.engines() == {"engine-a", "engine-b", "engine-c"}
    for name in ("engine-a", "engine-b", "engine-c"):
        consumer.engine_lost(name, "it is gone", 2.0)
    assert consumer.engines() == set()


def test_strangers_change_nothing() -> None:
    """Messages of other ranks, engine starts, transfers and kinds are ignored."""
    consumer = offered()
    for peer, message in (
        (Peer("engine-a", 2), Fin("t", 0)),
        (Peer("engine-a-before", 0), FIN0),
        (P0, Fin("t-other", 31)),
        (P0, Welcome()),
        (P0, Cancel("t", 1)),
    ):
        assert consumer.message(peer, message, 1.0) == []
    assert consumer.counts()["offered"] == 1


def test_whatever_comes_after_the_end_is_ignored() -> None:
    """Messages of a transfer that has ended are ignored."""
    consumer = offered()
    consumer.message(P0, FIN0, 1.0)
    consumer.message(P1, FIN1, 1.0)
    for message in (FIN0, Alive("t"), Aborted("t", "x"), Cancelled("t")):
        assert consumer.message(P0, message, 2.0) == []


def test_release_cancels_at_every_partner() -> None:
    """A request that needs nothing from its producer ends the lease early."""
    consumer = offered()
    assert consumer.release("t9", ENGINE, 1.0) == [Send(P0, Cancel("t9", 2)), Send(P1, Cancel("t9", 2))]


def test_release_connects_where_it_must() -> None:
    """With an unknown engine: Connect, then Cancel; dropped if the handshake fails or takes
    lease_s.
    """
    consumer = Consumer(GROUPS, LIMITS)
    assert consumer.release("t", ENGINE, 0.0) == [Connect(ENGINE)]
    assert consumer.connected("engine-a", PARTNERS, 1.0) == cancels(P0, P1)
    assert consumer.connected("engine-a", PARTNERS, 2.0) == []
    consumer.release("t", OTHER, 0.0)
    consumer.connect_failed("engine-b", "no", 1.0)
    assert consumer.connected("engine-b", PARTNERS, 2.0) == []
    late = Consumer(GROUPS, LIMITS)
    late.release("t", ENGINE, 0.0)
    assert late.tick(20.0) == []
    assert late.connected("engine-a", PARTNERS, 20.1) == []


def test_a_failed_handshake_of_a_known_engine() -> None:
    """The next request starts with a handshake, too: the engine may not read an Offer."""
    consumer = offered()
    consumer.connect_failed("engine-a", "no answer", 1.0)
    assert consumer.start(order("r2", "t2"), 2.0) == [Connect(ENGINE)]
    assert len(sends(consumer.connected("engine-a", PARTNERS, 3.0))) == 2
    assert consumer.start(order("r3", "t3"), 4.0) != [Connect(ENGINE)]


def test_abort_while_connecting_releases() -> None:
    """CONNECTING + abort -> gone at once; after the handshake the producer receives a Cancel."""
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    assert consumer.abort("r", 1.0) == [Received("r", "the request was aborted")]
    assert consumer.connected("engine-a", PARTNERS, 2.0) == cancels(P0, P1)


def test_a_transfer_id_is_for_one_request() -> None:
    """A second request with an id in use (n > 1 copies it) fails: the Fin is not for its blocks."""
    consumer = offered()
    twin = Order("twin", "t", ENGINE, 9, "digest", (blocks(14, 15, 16), blocks(17)))
    assert list(failures(consumer.start(twin, 1.0))) == ["twin"]
    consumer.message(P0, FIN0, 2.0)
    assert consumer.message(P1, FIN1, 2.0) == [Received("r", None)]
    assert empty(consumer)


def test_a_used_transfer_id_is_remembered() -> None:
    """An id stays used for lease_s after the end of its reception, so that a late Fin has no
    effect.
    """
    consumer = offered()
    consumer.tick(8.0)
    consumer.message(P0, FIN0, 8.5)
    consumer.message(P1, FIN1, 8.5)
    consumer.tick(27.9)
    assert failures(consumer.start(order("again"), 27.9)) == {
        "again": "the transfer id has been used by another request; use a new transfer_id for each request"
    }
    consumer.tick(28.5)
    assert [send.peer for send in sends(consumer.start(order("again"), 28.5))] == [P0, P1]


# ---- bytes ---------------------------------------------------------------------------------------


def test_expected_bytes_by_hand() -> None:
    """Units of each group times the partner's bytes per unit."""
    nothing = replace(order(), groups=(empty_blocks(), blocks(9)))
    assert expected_bytes(GROUPS, order(), PARTNERS[0]) == 31
    assert expected_bytes(GROUPS, nothing, Partner(P0, SHAPES, (10, 0))) == 0
    halves = (UnitShape(2, 2, 2), UnitShape(4, 1, 1))
    # 9 tokens of 3 blocks of 4: five halves contain some of them
    assert expected_bytes(GROUPS, order(), Partner(P0, halves, (10, 1))) == 51


def test_a_partner_without_a_share_is_waited_for() -> None:
    """A partner without a share writes nothing and sends Fin with 0 bytes."""
    consumer = Consumer(GROUPS, LIMITS)
    consumer.start(order(), 0.0)
    consumer.connected("engine-a", (PARTNERS[0], Partner(P1, SHAPES, (0, 0))), 0.0)
    assert consumer.message(P0, FIN0, 1.0) == []
    assert consumer.message(P1, Fin("t", 0), 1.0) == [Received("r", None)]


# ---- Failed --------------------------------------------------------------------------------------


def test_a_failed_write_puts_the_blocks_into_quarantine_at_once() -> None:
    """OFFERED + Failed -> QUARANTINE: an error report is no acknowledgement; the request ends at
    once.
    """
    consumer = offered()
    received = Received("r", "prefill rank 0: a write failed", quarantine="t")
    assert consumer.message(P0, Failed("t", "a write failed"), 1.0) == [*cancels(P0, P1), received]
    assert consumer.message(P0, Failed("t", "a write failed"), 2.0) == []
    assert consumer.message(P1, Cancelled("t"), 2.0) == []
    assert {each.peer for each in consumer.suspects()} == {P0}
    assert consumer.tick(3.0) == [*cancels(P0), Connect(ENGINE)]
    assert consumer.engine_lost("engine-a", "dead", 4.0) == [Freed("r", "t"), Forget(P0), Forget(P1)]
    assert empty(consumer)


def test_a_failed_write_of_a_transfer_that_was_given_up() -> None:
    """ENDING + Failed -> QUARANTINE, before cancel_s has passed."""
    consumer = offered()
    assert consumer.abort("r", 1.0) == cancels(P0, P1)
    received = Received("r", "the request was aborted", quarantine="t")
    assert consumer.message(P1, Failed("t", "a write failed"), 1.5) == [received]
    assert consumer.message(P0, Cancelled("t"), 1.6) == []
    assert consumer.counts()["quarantined"] == 1


def test_a_failed_write_of_another_rank_keeps_blocks_that_are_verified() -> None:
    """Fin of one rank, Failed of the other: the blocks stay in quarantine for the one that
    failed.
    """
    consumer = offered()
    assert consumer.message(P1, FIN1, 1.0) == []
    actions = consumer.message(P0, Failed("t", "a write failed"), 2.0)
    assert actions == [*cancels(P0), Received("r", "prefill rank 0: a write failed", quarantine="t")]


def test_failed_of_strangers_changes_nothing() -> None:
    """Failed of a transfer that has ended, or of a rank that has answered, is ignored."""
    consumer = offered()
    consumer.message(P0, FIN0, 1.0)
    assert consumer.message(P0, Failed("t", "late"), 1.0) == []
    assert consumer.message(P1, Failed("another", "late"), 1.0) == []
    assert consumer.message(P1, FIN1, 1.0) == [Received("r", None)]


# ---- worker_lost ---------------------------------------------------------------------------------


def test_the_death_of_one_worker_says_nothing_of_another() -> None:
    """QUARANTINE + worker_lost of one: the other may still write; Freed at its death."""
    consumer = offered()
    consumer.tick(LIMITS.progress_s)
    consumer.tick(LIMITS.progress_s + LIMITS.cancel_s)
    assert {each.peer for each in consumer.suspects()} == {P0, P1}
    assert consumer.worker_lost(P1, "its process is gone", 20.0) == []
    assert {each.peer for each in consumer.suspects()} == {P0}
    assert consumer.worker_lost(P0, "its process is gone", 30.0) == [Freed("r", "t")]
    assert empty(consumer)


def test_a_dead_worker_ends_transfers_and_its_engine_is_greeted_afresh() -> None:
    """OFFERED + worker_lost -> ENDING: Cancel to the other; the next request starts a handshake."""
    consumer = offered()
    assert consumer.worker_lost(P1, "its process is gone", 1.0) == cancels(P0)
    assert consumer.message(P0, Cancelled("t"), 2.0) == [Received("r", "prefill rank 1: its process is gone")]
    assert consumer.start(order("r2", "t2"), 3.0) == [Connect(ENGINE)]


def test_the_death_of_a_stranger_changes_nothing() -> None:
    """worker_lost of another start of the engine, or of a rank that is no partner, has no
    effect.
    """
    consumer = offered()
    assert consumer.worker_lost(Peer("engine-b", 0), "gone", 1.0) == []
    assert consumer.worker_lost(Peer("engine-a", 7), "gone", 1.0) == []
    assert consumer.counts()["offered"] == 1
