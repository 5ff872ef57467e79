"""A transfer of the producer's machine, row by row of the first table in its docstring."""

import pytest

from connectors.protocol.actions import Send, Sent
from connectors.protocol.wire import Aborted, Cancel, Cancelled, Fin
from tests.protocol.production import (
    C0,
    C1,
    TABLES,
    aborted_reason,
    finish_write,
    held,
    live,
    machine,
    moves,
    offer,
    only_write,
)


def test_an_offer_before_its_request_is_remembered() -> None:
    """(none) + Offer -> EARLY; EARLY + expect -> LIVE, and chunks are written as they complete."""
    producer = machine()
    assert producer.message(C0, offer(), 0.0) == []
    assert producer.counts()["early"] == 1
    assert producer.expect("r", "t", 12, "digest", 5.0) == []
    assert producer.counts() == {"early": 0, "live": 1, "held": 0, "writes": 0, "remembered": 0, "hanging": 0}
    assert moves(only_write(producer.progress("r", [[1], [4]], 4, 6.0))) == {0: [(1, 50)]}


def test_an_early_transfer_expires() -> None:
    """EARLY + lease_s -> gone; the open delivery is Aborted, and the id is remembered for
    lease_s.
    """
    producer = machine()
    producer.message(C0, offer(), 0.0)
    assert producer.tick(19.9) == []
    assert aborted_reason(producer.tick(20.0)) == "the prefill request did not arrive in time"
    assert producer.counts()["remembered"] == 1
    producer.tick(40.0)
    assert not any(producer.counts().values())


def test_an_early_transfer_of_a_cancel_expires() -> None:
    """(none) + Cancel -> EARLY, Cancelled; gone after lease_s, without a message."""
    producer = machine()
    assert producer.message(C0, Cancel("t"), 0.0) == [Send(C0, Cancelled("t"))]
    assert producer.tick(20.0) == []
    assert producer.counts()["early"] == 0


def test_cancel_before_the_request_ends_the_lease_before_it_begins() -> None:
    """A request whose consumer has already cancelled is Sent as soon as it has finished."""
    producer = machine()
    producer.message(C0, Cancel("t"), 0.0)
    producer.expect("r", "t", 12, "digest", 1.0)
    assert producer.progress("r", *TABLES, 2.0) == []
    assert producer.finished("r", True, "", 3.0) == [Sent("r")]


def test_chunks_leave_as_they_complete() -> None:
    """LIVE: full attention block by block, a window's blocks once complete, Fin with all bytes."""
    producer = live()
    assert producer.message(C0, offer(), 0.5) == []
    first = only_write(producer.progress("r", [[1, 2], [4, 5]], 7, 1.0))
    assert moves(first) == {0: [(1, 50)]}
    second = only_write(producer.progress("r", [[3], [6]], 10, 2.0))
    assert moves(second) == {0: [(2, 51)]}
    third = only_write(producer.progress("r", [[], []], 12, 3.0))
    assert moves(third) == {0: [(3, 52)], 1: [(6, 60)]}
    assert finish_write(producer, second, 20, 3.1) == []
    assert finish_write(producer, first, 10, 3.2) == []
    assert finish_write(producer, third, 31, 3.3) == [Send(C0, Fin("t", 61))]
    assert producer.finished("r", True, "", 4.0) == [Sent("r")]
    assert producer.counts() == {"early": 0, "live": 0, "held": 0, "writes": 0, "remembered": 1, "hanging": 0}


def test_a_late_offer_gets_everything_at_once() -> None:
    """HELD + Offer: one write; Fin and Sent when it has ended."""
    producer = held()
    write = only_write(producer.message(C0, offer(), 10.0))
    assert moves(write) == {0: [(1, 50), (2, 51), (3, 52)], 1: [(6, 60)]}
    assert finish_write(producer, write, 61, 11.0) == [Send(C0, Fin("t", 61)), Sent("r")]


def test_all_ranks_are_waited_for() -> None:
    """HELD + all deliveries closed -> Sent, after the last rank of the consumer."""
    producer = held((0, 1))
    first = only_write(producer.message(C0, offer(), 3.0))
    assert finish_write(producer, first, 61, 4.0) == [Send(C0, Fin("t", 61))]
    second = only_write(producer.message(C1, offer(), 5.0))
    assert finish_write(producer, second, 61, 6.0) == [Send(C1, Fin("t", 61)), Sent("r")]


def test_one_rank_may_want_nothing() -> None:
    """A Cancel closes one rank's delivery as a Fin does."""
    producer = held((0, 1))
    finish_write(producer, only_write(producer.message(C0, offer(), 3.0)), 61, 4.0)
    assert producer.message(C1, Cancel("t"), 5.0) == [Send(C1, Cancelled("t")), Sent("r")]


def test_a_discarded_transfer_is_held_for_nobody() -> None:
    """HELD + discard -> gone, Sent; a later offer is refused."""
    producer = held()
    assert producer.discard("t", 3.0) == [Sent("r")]
    assert aborted_reason(producer.message(C0, offer(), 4.0)).startswith("this transfer has ended")
    assert producer.discard("t", 5.0) == []


def test_a_discard_while_the_prompt_is_computed() -> None:
    """LIVE + discard: the open delivery and late offers are Aborted; the request's end releases
    it.
    """
    producer = live((0, 1))
    assert producer.message(C0, offer(), 0.5) == []
    assert producer.discard("t", 1.0) == [Send(C0, Aborted("t", "the router has discarded the transfer"))]
    assert aborted_reason(producer.message(C1, offer(), 1.5)).startswith("this transfer has ended")
    assert producer.message(C1, Cancel("t"), 1.6) == [Send(C1, Cancelled("t"))]
    assert producer.progress("r", *TABLES, 2.0) == []
    assert producer.finished("r", True, "", 3.0) == [Sent("r")]


def test_a_discard_does_not_end_under_a_write() -> None:
    """HELD + discard with a write in flight: the blocks stay until it has ended."""
    producer = held((0, 1))
    write = only_write(producer.message(C0, offer(), 3.0))
    assert producer.discard("t", 4.0) == []
    gave_up = Aborted("t", "the router has discarded the transfer")
    assert finish_write(producer, write, 61, 5.0) == [Send(C0, gave_up), Sent("r")]


@pytest.mark.parametrize("offered", [True, False])
def test_a_discard_before_the_request(offered: bool) -> None:
    """(none) or EARLY + discard: the offer is Aborted; a request that still arrives is Sent at
    its end.
    """
    producer = machine()
    if offered:
        producer.message(C0, offer(), 0.0)
    assert len(producer.discard("t", 1.0)) == offered
    producer.expect("r", "t", 12, "digest", 2.0)
    assert producer.progress("r", *TABLES, 3.0) == []
    assert producer.finished("r", True, "", 4.0) == [Sent("r")]
    producer.tick(40.0)
    assert not any(producer.counts().values())


def test_a_lease_expires() -> None:
    """HELD + lease_s, no offer -> gone, Sent, once."""
    producer = held()
    assert producer.tick(21.9) == []
    assert producer.tick(22.0) == [Sent("r")]
    assert (
        aborted_reason(producer.message(C0, offer(), 23.0)) == "this transfer has ended or belongs to another consumer"
    )
    assert producer.tick(42.0) == []
    assert not any(producer.counts().values())


def test_a_lease_ends_for_the_ranks_that_did_not_come() -> None:
    """If one rank is served and the other silent, Sent follows after lease_s."""
    producer = held((0, 1))
    finish_write(producer, only_write(producer.message(C0, offer(), 3.0)), 61, 4.0)
    assert producer.tick(22.0) == [Sent("r")]


def test_a_lease_does_not_end_under_a_write() -> None:
    """HELD + lease_s with a write in flight: the blocks stay until it has ended."""
    producer = held()
    write = only_write(producer.message(C0, offer(), 21.0))
    assert Sent("r") not in producer.tick(22.0)
    assert finish_write(producer, write, 61, 30.0) == [Send(C0, Fin("t", 61)), Sent("r")]


def test_a_request_that_is_not_held_aborts() -> None:
    """LIVE + finished, not held -> gone; open deliveries are Aborted with the reason, no Sent."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    assert producer.finished("r", False, "the client left", 1.0) == [Send(C0, Aborted("t", "the client left"))]
    assert producer.counts() == {"early": 0, "live": 0, "held": 0, "writes": 0, "remembered": 1, "hanging": 0}


def test_finished_of_an_unknown_request() -> None:
    """A held request that this rank does not know is Sent; otherwise its blocks would stay
    forever.
    """
    producer = machine()
    assert producer.finished("who", True, "", 0.0) == [Sent("who")]
    assert producer.finished("who", False, "", 0.0) == []
    assert producer.progress("who", [[], []], 3, 0.0) == producer.preempted("who", 0.0) == []
    assert producer.writes_in_flight("who") == ()


@pytest.mark.parametrize("stage", ["live", "held", "gone"])
def test_an_id_is_for_one_request(stage: str) -> None:
    """A second request with a used id is computed, writes nothing, and is Sent when it has
    finished.
    """
    producer = {"live": live, "held": held, "gone": held}[stage]()
    if stage == "gone":
        producer.tick(22.0)
    assert producer.expect("again", "t", 12, "digest", 22.5) == []
    assert producer.progress("again", *TABLES, 22.6) == []
    assert producer.finished("again", True, "", 22.7) == [Sent("again")]
    assert producer.counts()["held"] == (stage == "held")
    assert producer.counts()["live"] == (stage == "live")
