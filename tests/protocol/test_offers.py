"""Offers and digests of a producer: refusals, limits, digests of what was sent, exceptions."""

import weakref
from dataclasses import replace
from typing import Any

import pytest

from connectors.planning.blocks import UnitShape
from connectors.planning.layout import Group, GroupKind
from connectors.protocol import producer as owner
from connectors.protocol import production
from connectors.protocol.actions import Send
from connectors.protocol.delivery import MAX_EARLY, ConsumerPeer, Delivery, Stage, Transfer, offer_problem, take
from connectors.protocol.wire import Aborted, Offer, Peer
from tests.protocol.scripts import LIMITS, SHAPES, ProducerPlayer, Tally, blocks

NONE = blocks([], [])
OFFER = Offer("t", 11, "digest", (blocks([0, 1, 2], [50, 51, 52]), blocks([2], [60]), blocks([0], [61])))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"groups": (NONE, NONE, NONE)}, None),
        ({"prompt_digest": "other"}, "different prompts"),
        ({"digest": True}, "digest"),
        ({"end_token": 12}, None),
        ({"end_token": 13}, "13 tokens"),
        ({"groups": (NONE,)}, "1 KV cache groups"),
        ({"groups": (blocks([0], [99]), NONE, NONE)}, None),
        ({"groups": (blocks([0], [100]), NONE, NONE)}, "block 100"),
        ({"groups": (blocks([0, 3], [50, 51]), NONE, NONE)}, "group 0"),
        ({"end_token": 8, "groups": (blocks([2], [51]), NONE, NONE)}, "group 0"),
        ({"end_token": 8, "groups": (NONE, blocks([1], [60]), NONE)}, "group 1"),  # it has left the window
        ({"groups": (NONE, NONE, blocks([1], [61]))}, "group 2"),
        ({"groups": (NONE, NONE, blocks([0, 1], [61, 62]))}, "group 2"),
    ],
)
def test_offers_that_cannot_be_served(changes: dict[str, Any], says: str | None) -> None:
    """A prompt of 12 tokens, for full attention, a window of 4 tokens and a state."""
    groups = [Group(0, GroupKind.FULL, 4, None, ()), Group(1, GroupKind.SLIDING, 4, 4, ())]
    groups.append(Group(2, GroupKind.STATE, 4, None, ()))
    consumer = ConsumerPeer(frozenset({0}), 100, (*SHAPES, UnitShape(1, 1, 1)))
    transfer = Transfer("t", Stage.LIVE, 0.0, prompt_tokens=12, prompt_digest="digest")
    problem = offer_problem(transfer, replace(OFFER, **changes), groups, consumer)
    assert problem is None if says is None else says in (problem or "")


def test_units_of_larger_blocks_are_read_at_their_part() -> None:
    """A consumer with blocks of 2 tokens; the producer's have 4."""
    consumer = ConsumerPeer(frozenset({0}), 100, (UnitShape(2, 2, 1),))
    transfer = Transfer("t", Stage.LIVE, 0.0, prompt_tokens=6, prompt_digest="digest", computed_tokens=6)
    transfer.tables = [[7, 8]]
    offer = Offer("t", 6, "digest", (blocks([0, 1, 2], [50, 51, 52]),))
    groups = [Group(0, GroupKind.FULL, 4, None, ())]
    problem, (moves,) = take(transfer, Delivery(Peer("c", 0), offer=offer), offer, groups, consumer)
    assert problem is None
    assert (moves.src_ids.tolist(), moves.src_parts.tolist()) == ([7, 7, 8], [0, 1, 0])
    assert (moves.dst_ids.tolist(), moves.dst_parts.tolist()) == ([50, 51, 52], [0, 0, 0])


def test_a_freed_block_is_not_read() -> None:
    """The null block in the producer's table ends the delivery."""
    player = ProducerPlayer()
    player.play("0 expect\n0 offer 0")
    assert player.machine.progress("r", [[1, 0, 3], [4, 5, 6]], 12, 1.0) == [
        Send(Peer("c", 0), Aborted("t", "the prefill engine has freed a requested block"))
    ]


def test_an_offer_without_a_request_ends_with_its_reason() -> None:
    player = ProducerPlayer()
    player.play("0 offer 0")
    assert player.machine.tick(20.0) == [Send(Peer("c", 0), Aborted("t", "the prefill request did not arrive in time"))]


# ---- limits on early transfers -------------------------------------------------------------------


def flooded() -> ProducerPlayer:
    """Return a producer with as many early transfers of engine ``c`` as it accepts."""
    player = ProducerPlayer()
    for number in range(MAX_EARLY):
        assert list(player.answer(f"0 await_start 0 early{number}")) == []
    return player


def test_messages_beyond_the_limit_are_ignored() -> None:
    """An answer would let the consumer reuse its blocks, and the producer could not remember it."""
    player = flooded()
    player.play(f"""
        1 offer 0 more
        1 cancel 1 more
        1 await_start 0 more
        1 counts | {MAX_EARLY} early
        1 cancel 0 early7 | cancelled 0 early7
        1 offer d0 theirs
        1 counts | {MAX_EARLY + 1} early
        2 expect r more
        2 progress 12
    """)


def test_the_end_of_an_early_transfer_makes_room() -> None:
    """A request arrives, one is discarded, the others expire."""
    player = flooded()
    player.play("""
        1 expect r early0
        1 offer 0 a
        1 offer 0 b
        1 discard early1 | aborted 0 early1
        1 offer 0 c
        1 cancel 0 d
    """)
    assert len(list(player.answer(f"{1 + LIMITS.lease_s} tick"))) == MAX_EARLY + 1  # one Alive
    player.play("""
        22 counts | 1 live, 1024 remembered
        22 cancel 0 e | cancelled 0 e
        22 counts | 1 early, 1 live, 1024 remembered
    """)


# ---- digests -------------------------------------------------------------------------------------

OPEN = "0 expect\n0 offer 0 digest=yes"


@pytest.mark.parametrize("end", ["", "cancel 0", "preempted", "discard t", "left", "peer_lost 0", "broken 1"])
def test_a_digest_goes_with_its_delivery(end: str) -> None:
    """No object keeps a digest, which may hold memory of a device, after the last write."""
    player, made = ProducerPlayer(), []

    def new_digest() -> Tally:
        digest = Tally()
        made.append(weakref.ref(digest))
        return digest

    player.machine.welcome(player.peer("0"), ConsumerPeer(frozenset({0}), 100, SHAPES, new_digest), 0.0)
    player.play(f"{OPEN}\n1 progress 12 | write 0 1>50 2>51 3>52 6>60")
    assert made[0]() is not None
    for event in filter(None, (end, "fenced r" if end == "preempted" else "", "" if end == "broken 1" else "done 1")):
        list(player.answer(f"2 {event}"))
    player.writes.clear()
    assert made[0]() is None


@pytest.mark.parametrize(("module", "name"), [(production, "take"), (owner, "take_layers")])
def test_an_exception_ends_one_delivery(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    """The write to the other rank is posted: an exception must not lose it."""
    player, real = ProducerPlayer((0, 1)), getattr(module, name)
    player.play("0 expect\n0 offer 0\n0 offer 1")

    def fails(transfer: Any, delivery: Any, *others: Any) -> Any:
        if delivery.peer.rank == 1:
            raise MemoryError
        return real(transfer, delivery, *others)

    monkeypatch.setattr(module, name, fails)
    if name == "take":
        player.play("1 progress 12 | write 0 1>50 2>51 3>52 6>60, aborted 1")
    else:
        player.play("1 begin 12\n1 layers 0 1 | write 0 1>50/0-1 2>51/0-1 3>52/0-1, aborted 1")
    player.play("1 in_flight | 1")
