"""A delivery of the producer's machine, row by row of the second table; preemption, loss, time."""

import weakref
from dataclasses import replace
from typing import Any

import pytest

from connectors.planning.blocks import empty_blocks
from connectors.protocol import producer as owner
from connectors.protocol import production
from connectors.protocol.actions import Forget, ProducerAction, Send, Sent, Write
from connectors.protocol.delivery import ConsumerPeer, Delivery, Transfer
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Aborted, Alive, Cancel, Cancelled, Failed, Fin, Offer, Welcome
from testing.connector_state import snapshot
from tests.campaigns.schedules.tally import Tally
from tests.protocol.production import (
    C0,
    C1,
    LIMITS,
    SHAPES,
    STRANGER,
    TABLES,
    aborted_reason,
    blocks,
    finish_write,
    held,
    live,
    machine,
    moves,
    offer,
    only_write,
    written,
)


def test_fin_waits_for_the_writes() -> None:
    """OPEN + all written -> CLOSED, Fin, after all writes in flight."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    first = only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0))
    last = only_write(producer.progress("r", [[3], [6]], 12, 2.0))
    assert finish_write(producer, last, 21, 2.5) == []
    assert producer.writes_in_flight("r") == (first.write_id,)
    assert finish_write(producer, first, 40, 3.0) == [Send(C0, Fin("t", 61))]


def test_cancel_waits_for_the_writes() -> None:
    """OPEN + Cancel -> CLOSED, Cancelled, after its writes have ended, without new writes."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    write = only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0))
    assert producer.message(C0, Cancel("t"), 1.5) == []
    assert producer.message(C0, Cancel("t"), 1.6) == []
    assert producer.progress("r", [[3], [6]], 12, 2.0) == []
    assert finish_write(producer, write, 20, 3.0) == [Send(C0, Cancelled("t"))]
    assert producer.message(C0, Cancel("t"), 4.0) == [Send(C0, Cancelled("t"))]


def test_a_write_that_was_not_posted_aborts_when_all_have_ended() -> None:
    """OPEN + a failure -> CLOSED, Aborted, after its writes have ended."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    first = only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0))
    second = only_write(producer.progress("r", [[3], [6]], 12, 2.0))
    assert producer.write_refused(first.write_id, "broken", 2.5) == []
    assert aborted_reason(finish_write(producer, second, 21, 3.0)) == "a write could not be posted: broken"
    assert producer.finished("r", True, "", 4.0) == [Sent("r")]


def test_a_failed_write_is_never_acknowledged() -> None:
    """OPEN + a write fails -> CLOSED, Failed at once and for every later Offer and Cancel;
    blocks are freed.
    """
    producer = live()
    producer.message(C0, offer(), 0.5)
    first = only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0))
    second = only_write(producer.progress("r", [[3], [6]], 12, 2.0))
    failed = Send(C0, Failed("t", "a write failed: broken"))
    assert producer.write_failed(first.write_id, "broken", 2.5) == [failed]
    assert producer.message(C0, Cancel("t", 7), 2.6) == [failed]
    assert finish_write(producer, second, 21, 3.0) == []
    assert producer.write_done(only_write(producer.message(C1, offer(), 3.5)).write_id, 3.6)
    assert producer.finished("r", True, "", 4.0) == [Sent("r")]
    assert producer.message(C0, Cancel("t", 7), 4.0) == [failed]


def test_a_failed_write_is_remembered_by_both_ends_names() -> None:
    """The failed write counts even after transfer and consumer were removed and reappeared."""
    producer = held()
    write = only_write(producer.message(C0, offer(), 3.0))
    failed = Send(C0, Failed("t", "a write failed: broken"))
    assert producer.write_failed(write.write_id, "broken", 4.0) == [failed, Sent("r")]
    producer.tick(5.0 + LIMITS.lease_s)
    assert Forget(C0) in producer.tick(5.0 + LIMITS.forget_s)
    assert not any(producer.counts().values())
    again = 6.0 + LIMITS.forget_s
    producer.welcome(C0, snapshot(machine()).consumers[C0], again)
    assert producer.message(C0, Cancel("t", 7), again) == [failed]
    assert producer.message(C0, offer(), again) == [failed]
    assert producer.message(C0, Cancel("another", 8), again) == [Send(C0, Cancelled("another"))]
    producer.engine_lost(C0.incarnation, again)
    assert snapshot(producer).failed == {}


def test_a_write_that_fails_after_the_end_of_its_consumer_is_not_remembered() -> None:
    """A dead worker sends no Cancel, and its end is reported only once."""
    producer = held()
    write = only_write(producer.message(C0, offer(), 3.0))
    assert producer.engine_lost(C0.incarnation, 4.0) == []
    assert producer.write_failed(write.write_id, "broken", 5.0) == [Sent("r")]
    assert snapshot(producer).failed == {}


def test_a_failed_write_is_no_sign_of_life() -> None:
    """If Failed is lost, the consumer's deadline ends its wait."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    first = only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0))
    producer.write_failed(first.write_id, "broken", 1.0)
    assert producer.tick(2.0 + LIMITS.alive_s) == []


def test_one_consumer_rank_does_not_disturb_another() -> None:
    """A failure of one delivery does not affect the other."""
    producer = live((0, 1))
    producer.message(C0, offer(), 0.5)
    producer.message(C1, offer(), 0.5)
    to0, to1 = written(producer.progress("r", *TABLES, 1.0))
    assert aborted_reason(producer.write_refused(to0.write_id, "no", 2.0)) == "a write could not be posted: no"
    assert finish_write(producer, to1, 61, 3.0) == [Send(C1, Fin("t", 61))]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"digest": "other"}, "different prompts"),
        ({"end_token": 13}, "the offer is for 13 tokens, but prefill sends 12"),
        ({"groups": (blocks([0], [50]),)}, "1 KV cache groups, but the model has 2"),
        ({"groups": (blocks([0], [100]), empty_blocks())}, "block 100 does not exist"),
        ({"groups": (blocks([0, 3], [50, 51]), empty_blocks())}, "group 0 lies after the last requested token"),
    ],
)
def test_offers_that_cannot_be_served(changes: dict[str, Any], says: str) -> None:
    """An unservable offer is answered with Aborted and a reason once the request is known."""
    wanted = offer(end_token=changes.get("end_token", 11), digest=changes.get("digest", "digest"))
    wanted = Offer("t", wanted.end_token, wanted.prompt_digest, changes.get("groups", wanted.groups))
    early = machine()
    assert early.message(C0, wanted, 0.0) == []
    assert says in aborted_reason(early.expect("r", "t", 12, "digest", 1.0))
    late = live()
    late.progress("r", *TABLES, 1.0)
    assert says in aborted_reason(late.message(C0, wanted, 2.0))


def test_a_block_that_has_left_the_window_is_not_sent() -> None:
    """A window before the prompt's last one may have been freed and reused: Aborted."""
    producer = live()
    producer.progress("r", *TABLES, 1.0)
    wanted = Offer("t", 8, "digest", (blocks([0, 1], [50, 51]), blocks([1], [60])))
    assert "group 1" in aborted_reason(producer.message(C0, wanted, 2.0))


def test_a_null_block_at_the_source_is_not_sent() -> None:
    """A block that the producer no longer has is Aborted, never read from the null block."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    reason = aborted_reason(producer.progress("r", [[1, 0, 3], [4, 5, 6]], 12, 1.0))
    assert reason == "the prefill engine has freed a requested block"


def test_blocks_that_never_come_are_missed() -> None:
    """A table shorter than the prompt leaves blocks unwritten: Aborted, by group, never a Fin."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    write = only_write(producer.progress("r", [[1], [4]], 12, 1.0))
    reason = aborted_reason(finish_write(producer, write, 10, 2.0))
    assert reason == "KV cache groups 0, 1: prefill computed past the token whose state decode requested"


# ---- digests -------------------------------------------------------------------------------------


def asking(tallies: list[Tally], can: bool = True) -> Producer:
    """Return a machine with a live request and an offer that requests a digest, and whether it
    can compute one.
    """

    def new_digest() -> Tally:
        tallies.append(Tally())
        return tallies[-1]

    producer = machine()
    producer.welcome(C0, ConsumerPeer(frozenset({0}), 100, SHAPES, new_digest if can else None), 0.0)
    producer.expect("r", "t", 12, "digest", 0.0)
    return producer


ASKING = replace(offer(), digest=True)


def posted(producer: Producer, write: Write, total_bytes: int, now: float) -> list[ProducerAction]:
    """Act as the owner: post, add the source's bytes to the digest, and end the write."""
    assert write.digest is not None
    for move in write.moves:
        write.digest.add(move.group, move.src_ids, move.src_parts, move.layers)
    return finish_write(producer, write, total_bytes, now)


def test_fin_carries_the_digest_of_all_writes() -> None:
    """Fin has one digest per delivery, for any number of chunks."""
    tallies: list[Tally] = []
    producer = asking(tallies)
    producer.message(C0, ASKING, 0.5)
    posted(producer, only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0)), 20, 1.5)
    fin = posted(producer, only_write(producer.progress("r", [[3], [6]], 12, 2.0)), 41, 2.5)
    assert len(tallies) == 1
    assert tallies[0].seen == {(0, 0): [1, 2, 3], (1, 0): [6]}
    assert fin == [Send(C0, Fin("t", 61, tallies[0].hexdigest()))]


def test_no_digest_unless_it_is_asked_for() -> None:
    """The offer decides whether Fin has a digest."""
    tallies: list[Tally] = []
    producer = asking(tallies)
    producer.message(C0, offer(), 0.5)
    write = only_write(producer.progress("r", *TABLES, 1.0))
    assert write.digest is None
    assert finish_write(producer, write, 61, 1.5) == [Send(C0, Fin("t", 61, ""))]
    assert tallies == []


def test_a_digest_that_cannot_be_made_is_refused() -> None:
    """Aborted with the reason, without a write: the consumer would not accept bytes without a
    digest.
    """
    producer = asking([], can=False)
    assert "computes no digests" in aborted_reason(producer.message(C0, ASKING, 0.5))


@pytest.mark.parametrize("ending", ["fin", "cancel", "failed write", "preempted", "discard", "not held", "peer lost"])
def test_a_digest_goes_with_its_delivery(ending: str) -> None:
    """After its last write, no object refers to a delivery's digest, however the delivery ended."""
    tallies: list[Tally] = []
    producer = asking(tallies)
    producer.message(C0, ASKING, 0.5)
    write = only_write(producer.progress("r", *TABLES, 1.0))
    kept = weakref.ref(tallies.pop())
    assert kept() is not None
    match ending:
        case "cancel":
            producer.message(C0, Cancel("t"), 2.0)
        case "preempted":
            producer.preempted("r", 2.0)
            producer.fenced("r", 2.0)
        case "discard":
            producer.discard("t", 2.0)
        case "not held":
            producer.finished("r", False, "the client left", 2.0)
        case "peer lost":
            producer.peer_lost(C0, 2.0)
    if ending == "failed write":
        producer.write_failed(write.write_id, "broken", 3.0)
    else:
        finish_write(producer, write, 61, 3.0)
    del write
    assert kept() is None


def test_the_last_unit_waits_for_the_whole_prompt() -> None:
    """The last prompt token lies in the last requested unit: no write may read the unit during
    its computation.
    """
    producer = live()
    producer.message(C0, offer(), 0.5)
    first = only_write(producer.progress("r", TABLES[0], 11, 1.0))
    assert moves(first) == {0: [(1, 50), (2, 51)]}
    assert finish_write(producer, first, 20, 1.5) == []
    last = only_write(producer.progress("r", [[], []], 12, 2.0))
    assert moves(last) == {0: [(3, 52)], 1: [(6, 60)]}
    assert finish_write(producer, last, 41, 2.5) == [Send(C0, Fin("t", 61))]


def test_what_is_complete_is_finished_before_the_prompt_is() -> None:
    """The last prompt token starts its own unit: Fin does not wait for it."""
    producer = live()
    producer.message(C0, Offer("t", 8, "digest", (blocks([0, 1], [50, 51]), empty_blocks())), 0.5)
    write = only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0))
    assert finish_write(producer, write, 20, 1.5) == [Send(C0, Fin("t", 20))]


# ---- preemption, loss, unknown peers, time -------------------------------------------------------


def test_preemption_during_a_write_aborts() -> None:
    """The old blocks may have another request's bytes: Aborted after the write."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    write = only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0))
    assert producer.writes_in_flight("r") == (write.write_id,)
    assert producer.preempted("r", 1.5) == producer.fenced("r", 1.6) == []
    assert aborted_reason(finish_write(producer, write, 20, 2.0)) == "the prefill was preempted during a write"


def test_a_write_that_ends_before_the_fence_counts() -> None:
    """No new write reads the old blocks of a preempted request; completed writes count."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    write = only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0))
    assert producer.preempted("r", 1.5) == []
    assert producer.message(C1, offer(), 1.55) == []
    assert finish_write(producer, write, 20, 1.6) == []
    assert producer.fenced("r", 1.7) == []
    last = written(producer.progress("r", [[11, 12, 13], [14, 15, 16]], 12, 3.0))
    assert [moves(each) for each in last] == [
        {0: [(13, 52)], 1: [(16, 60)]},
        {0: [(11, 50), (12, 51), (13, 52)], 1: [(16, 60)]},
    ]


def test_an_offer_before_the_fence_waits_for_the_recomputation() -> None:
    """The whole prompt had been computed, but its blocks are freed: this is no reason to abort."""
    producer = live()
    producer.progress("r", *TABLES, 1.0)
    assert producer.preempted("r", 1.5) == []
    assert producer.message(C0, offer(), 1.55) == producer.fenced("r", 1.6) == []
    write = only_write(producer.progress("r", [[11, 12, 13], [14, 15, 16]], 12, 3.0))
    assert moves(write) == {0: [(11, 50), (12, 51), (13, 52)], 1: [(16, 60)]}
    assert finish_write(producer, write, 61, 3.5) == [Send(C0, Fin("t", 61))]


@pytest.mark.parametrize("by_layers", [False, True])
def test_an_exception_ends_one_delivery_and_loses_no_write(monkeypatch: pytest.MonkeyPatch, by_layers: bool) -> None:
    """The owner gets the write that was registered before; the other rank gets Aborted."""
    module, name = (owner, "take_layers") if by_layers else (production, "take")
    real, producer = getattr(module, name), live((0, 1))
    producer.message(C0, offer(), 0.5)
    producer.message(C1, offer(), 0.5)

    def take(transfer: Transfer, delivery: Delivery, *others: Any) -> Any:
        if delivery.peer == C1:
            raise MemoryError("no memory")
        return real(transfer, delivery, *others)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, take)
        if by_layers:
            producer.begin("r", *TABLES)
            write, aborted = producer.layers_computed(["r"], 0, 1, 1.0)
        else:
            write, aborted = producer.progress("r", *TABLES, 1.0)
    assert "MemoryError('no memory')" in aborted_reason([aborted])
    assert producer.writes_in_flight("r") == (only_write([write]).write_id,)
    assert finish_write(producer, only_write([write]), 61, 2.0) == ([] if by_layers else [Send(C0, Fin("t", 61))])


def test_late_orders_delay_fin() -> None:
    """Fin follows the start of the next step, which would have reported a preemption."""
    producer = live(late_orders=True)
    producer.message(C0, offer(), 0.5)
    write = only_write(producer.progress("r", *TABLES, 1.0))
    assert finish_write(producer, write, 61, 1.2) == []
    assert producer.orders_applied(1.3) == [Send(C0, Fin("t", 61))]
    assert producer.orders_applied(1.4) == []


def test_late_orders_do_not_delay_fin_after_the_end() -> None:
    """The blocks of a held request are not free, so no step overwrites them."""
    producer = live(late_orders=True)
    producer.message(C0, offer(), 0.5)
    assert finish_write(producer, only_write(producer.progress("r", *TABLES, 1.0)), 61, 1.2) == []
    assert producer.finished("r", True, "", 1.3) == [Send(C0, Fin("t", 61)), Sent("r")]


def test_late_orders_after_an_end_in_the_same_step() -> None:
    """The end sends Fin and releases the request; the next step's orders find nothing to do."""
    producer = live(late_orders=True)
    producer.message(C0, offer(), 0.5)
    assert finish_write(producer, only_write(producer.progress("r", *TABLES, 1.0)), 61, 1.2) == []
    producer.finished("r", True, "", 1.3)
    assert producer.orders_applied(1.4) == []


def test_late_preemption_aborts_only_what_the_step_may_have_overwritten() -> None:
    """Writes that had finished before the last step began stay valid."""
    producer = live(late_orders=True)
    producer.message(C0, offer(), 0.5)
    finish_write(producer, only_write(producer.progress("r", [[1], [4]], 4, 1.0)), 10, 1.2)
    assert producer.orders_applied(1.3) == []
    assert producer.preempted("r", 1.5) == producer.fenced("r", 1.5) == []
    finish_write(producer, only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 2.0)), 10, 2.2)
    (aborted,) = [*producer.preempted("r", 2.5), *producer.fenced("r", 2.5)]
    assert aborted_reason([aborted]) == "the prefill was preempted during a write"


def test_preemption_between_writes_goes_on() -> None:
    """Written units stay valid; the rest is written from the new blocks after their computation."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    finish_write(producer, only_write(producer.progress("r", [[1, 2], [4, 5]], 8, 1.0)), 20, 1.2)
    assert producer.preempted("r", 1.5) == producer.fenced("r", 1.5) == []
    assert producer.progress("r", [[11], [14]], 4, 2.0) == []
    assert producer.progress("r", [[12], [15]], 8, 2.5) == []
    last = only_write(producer.progress("r", [[13], [16]], 12, 3.0))
    assert moves(last) == {0: [(13, 52)], 1: [(16, 60)]}
    assert finish_write(producer, last, 41, 3.5) == [Send(C0, Fin("t", 61))]


def test_a_lost_peer_ends_its_deliveries() -> None:
    """The lost peer's transfers end, their blocks are freed, and no message is sent to it."""
    producer = held()
    write = only_write(producer.message(C0, offer(), 3.0))
    assert producer.peer_lost(C0, 4.0) == []
    assert not producer.knows(C0)
    assert producer.write_failed(write.write_id, "unreachable", 5.0) == [Sent("r")]


def test_a_lost_peer_in_an_open_delivery() -> None:
    """During the computation as well: later chunks are not written."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    assert producer.peer_lost(C0, 1.0) == []
    assert producer.progress("r", *TABLES, 2.0) == []
    assert producer.finished("r", True, "", 3.0) == [Sent("r")]


def test_another_consumer_is_refused() -> None:
    """A transfer belongs to the first consumer engine that names it."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    assert "another consumer" in aborted_reason(producer.message(STRANGER, offer(), 1.0))
    assert producer.message(STRANGER, Cancel("t"), 1.0) == [Send(STRANGER, Cancelled("t"))]
    assert len(written(producer.progress("r", *TABLES, 2.0))) == 1


def test_a_second_offer_is_not_written_for() -> None:
    """An offer is valid once: a duplicate has no effect while the first is open."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    again = Offer("t", 11, "digest", (blocks([0, 1, 2], [70, 71, 72]), blocks([2], [80])))
    assert producer.message(C0, again, 0.6) == []
    assert moves(only_write(producer.progress("r", *TABLES, 1.0)))[0] == [(1, 50), (2, 51), (3, 52)]


def test_a_second_offer_is_never_answered_with_the_first_ones_fin() -> None:
    """Fin names a transfer only: after a second offer it would confirm unwritten blocks."""
    producer = live((0, 1))
    producer.progress("r", *TABLES, 1.0)
    finish_write(producer, only_write(producer.message(C0, offer(), 2.0)), 61, 3.0)
    again = Offer("t", 11, "digest", (blocks([0, 1, 2], [70, 71, 72]), blocks([2], [80])))
    aborted_reason(producer.message(C0, again, 4.0))


@pytest.mark.parametrize("question", [Cancel("t"), offer()], ids=["Cancel", "Offer"])
def test_a_gone_transfer_answers_when_its_writes_have_ended(question: Cancel | Offer) -> None:
    """A request ends during a write: the final message waits for the write's end."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    write = only_write(producer.progress("r", *TABLES, 1.0))
    assert producer.finished("r", False, "the client left", 2.0) == []
    assert producer.message(C0, question, 2.5) == []
    (answer,) = finish_write(producer, write, 61, 3.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Aborted | Cancelled)
    assert producer.message(C0, Cancel("t"), 4.0) == [Send(C0, Cancelled("t"))]


def test_a_gone_transfer_is_not_forgotten_during_a_write() -> None:
    """However long a write takes, no final message precedes its end."""
    producer = live()
    producer.message(C0, offer(), 0.5)
    write = only_write(producer.progress("r", *TABLES, 1.0))
    producer.finished("r", False, "the client left", 2.0)
    for now in (22.0, 42.0, 62.0):
        assert written(producer.tick(now)) == []
        assert producer.message(C0, Cancel("t"), now) == []
    assert finish_write(producer, write, 61, 70.0) == [Send(C0, Cancelled("t"))]
    producer.tick(90.0)
    producer.tick(110.0)
    assert not any(producer.counts().values())


def test_alive_while_the_consumer_waits() -> None:
    """Alive goes every alive_s to each consumer with an open offer, and to none before the
    request is known.
    """
    producer = machine()
    producer.message(C0, offer(), 0.0)
    assert producer.tick(1.0) == []
    producer.expect("r", "t", 12, "digest", 1.5)
    assert producer.tick(2.0) == [Send(C0, Alive("t"))]
    assert producer.tick(2.9) == []
    assert producer.tick(3.0) == [Send(C0, Alive("t"))]
    producer.message(C0, Cancel("t"), 3.5)
    assert producer.tick(5.0) == []


def test_what_is_not_for_a_producer_is_ignored() -> None:
    """Only messages of consumers are handled."""
    producer = live()
    for message in (Welcome(), Fin("t", 0), Alive("t"), Aborted("t", ""), Cancelled("t")):
        assert producer.message(C0, message, 1.0) == []


def digesting() -> Producer:
    """Return a machine whose consumer requests a digest of request "r"."""
    producer = live()
    producer.welcome(C0, ConsumerPeer(frozenset({0}), 100, SHAPES, Tally), 0.0)
    producer.message(C0, replace(offer(), digest=True), 0.5)
    return producer


@pytest.mark.parametrize(
    ("order", "alive"), [((0, 1, 2), [(2, 1), (1, 1)]), ((1, 0, 2), [(1, 1)]), ((1, 2, 0), [])], ids=str
)
def test_the_consumer_learns_which_units_have_arrived(order: tuple[int, ...], alive: list[tuple[int, ...]]) -> None:
    """OPEN + a write ends -> Alive with the units left, once all older writes have ended; Fin says
    the rest.
    """
    producer = digesting()
    chunks = (([[1], [4]], 4), ([[2], [5]], 8), ([[3], [6]], 12))
    writes = [only_write(producer.progress("r", ids, tokens, 1.0)) for ids, tokens in chunks]
    found = [finish_write(producer, writes[number], 1, 2.0) for number in order]
    told = [action.message for actions in found for action in actions if isinstance(action, Send)]
    assert [message.left for message in told if isinstance(message, Alive)] == alive
    assert isinstance(told[-1], Fin)


def test_layers_count_when_the_last_has_arrived() -> None:
    """A unit has arrived with all its layers."""
    producer = digesting()
    producer.begin("r", [[1, 2], [4, 5]], 8)
    first = only_write(producer.layers_computed(["r"], 0, 1, 1.0))
    assert finish_write(producer, first, 1, 1.5) == []
    rest = only_write(producer.progress("r", [[], []], 8, 2.0))
    assert finish_write(producer, rest, 1, 2.5) == [Send(C0, Alive("t", (1, 1)))]
