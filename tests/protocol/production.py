"""A producer's machine with one request of 12 tokens, and test helpers. Blocks have 4 tokens."""

from collections.abc import Iterable

import numpy as np

from connectors.planning.blocks import BlockSet, UnitShape
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.actions import ProducerAction, Send, Write
from connectors.protocol.delivery import ConsumerPeer
from connectors.protocol.limits import TransferLimits
from connectors.protocol.producer import Producer
from connectors.protocol.wire import Aborted, Offer, Peer

LIMITS = TransferLimits(handshake_s=7, progress_s=10, cancel_s=2, lease_s=20, alive_s=1, fence_s=1)
GROUPS = (Group(0, GroupKind.FULL, 4, None, ()), Group(1, GroupKind.SLIDING, 4, 4, ()))
SHAPES = (UnitShape(4, 1, 1), UnitShape(4, 1, 1))
C0, C1 = Peer("engine-c", 0), Peer("engine-c", 1)
STRANGER = Peer("engine-d", 0)


def blocks(positions: list[int], ids: list[int]) -> BlockSet:
    return BlockSet(np.array(positions, np.int64), np.array(ids, np.int64))


def offer(transfer_id: str = "t", end_token: int = 11, digest: str = "digest") -> Offer:
    """Return an offer for all 3 blocks of group 0 and the last one of group 1: 11 tokens of a
    prompt of 12.
    """
    return Offer(transfer_id, end_token, digest, (blocks([0, 1, 2], [50, 51, 52]), blocks([2], [60])))


TABLES = ([[1, 2, 3], [4, 5, 6]], 12)


def machine(ranks: tuple[int, ...] = (0,), late_orders: bool = False) -> Producer:
    """Return a machine that has welcomed the consumer's ranks."""
    producer = Producer(GROUPS, LIMITS, late_orders)
    for rank in (0, 1):
        producer.welcome(Peer("engine-c", rank), ConsumerPeer(frozenset(ranks), 100, SHAPES), 0.0)
    producer.welcome(STRANGER, ConsumerPeer(frozenset({0}), 100, SHAPES), 0.0)
    return producer


def live(ranks: tuple[int, ...] = (0,), late_orders: bool = False) -> Producer:
    producer = machine(ranks, late_orders)
    assert producer.expect("r", "t", 12, "digest", 0.0) == []
    return producer


def moves(write: Write) -> dict[int, list[tuple[int, int]]]:
    """Return (source block, destination block) pairs by group."""
    return {move.group: list(zip(move.src_ids.tolist(), move.dst_ids.tolist(), strict=True)) for move in write.moves}


def only_write(actions: list[ProducerAction]) -> Write:
    (write,) = actions
    assert isinstance(write, Write)
    return write


def finish_write(producer: Producer, write: Write, total_bytes: int, now: float) -> list[ProducerAction]:
    producer.write_posted(write.write_id, total_bytes)
    return producer.write_done(write.write_id, now)


def held(ranks: tuple[int, ...] = (0,)) -> Producer:
    """Return a machine with a computed and finished request without offers."""
    producer = live(ranks)
    producer.progress("r", *TABLES, 1.0)
    assert producer.finished("r", True, "", 2.0) == []
    return producer


def aborted_reason(actions: list[ProducerAction]) -> str:
    (send,) = actions
    assert isinstance(send, Send)
    assert isinstance(send.message, Aborted)
    return send.message.reason


def written(actions: Iterable[ProducerAction]) -> list[Write]:
    """Return the writes among some actions."""
    return [action for action in actions if isinstance(action, Write)]
