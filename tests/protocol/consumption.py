"""A consumer's machine with one request for 4 blocks from an engine of two ranks, and test
helpers.
"""

from collections.abc import Sequence

import numpy as np

from connectors.planning.blocks import BlockSet, UnitShape
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.actions import ConsumerAction, Received, Send
from connectors.protocol.consumer import Consumer
from connectors.protocol.engines import Partner
from connectors.protocol.limits import TransferLimits
from connectors.protocol.params import EngineAddress
from connectors.protocol.reception import Order
from connectors.protocol.wire import Cancel, Fin, Offer, Peer

LIMITS = TransferLimits(handshake_s=7, progress_s=10, cancel_s=2, lease_s=20, alive_s=1, fence_s=1)
ENGINE = EngineAddress("engine-a", "host", 1)
OTHER = EngineAddress("engine-b", "host", 2)
P0, P1 = Peer("engine-a", 0), Peer("engine-a", 1)
GROUPS = (Group(0, GroupKind.FULL, 4, None, ()), Group(1, GroupKind.FULL, 4, None, ()))
SHAPES = (UnitShape(4, 1, 1), UnitShape(4, 1, 1))
PARTNERS = (Partner(P0, SHAPES, (10, 1)), Partner(P1, SHAPES, (20, 0)))


def blocks(*ids: int) -> BlockSet:
    return BlockSet(np.arange(len(ids), dtype=np.int64), np.array(ids, np.int64))


def order(request_id: str = "r", transfer_id: str = "t", producer: EngineAddress = ENGINE) -> Order:
    return Order(request_id, transfer_id, producer, 9, "digest", (blocks(4, 5, 6), blocks(7)))


FIN0, FIN1 = Fin("t", 31), Fin("t", 60)


def offered(*orders: Order) -> Consumer:
    """Return a machine that has sent its offers: all partners of engine-a may write."""
    consumer = Consumer(GROUPS, LIMITS)
    for each in orders or (order(),):
        consumer.start(each, 0.0)
    consumer.connected("engine-a", PARTNERS, 0.0)
    return consumer


def failures(actions: Sequence[ConsumerAction]) -> dict[str, str]:
    """Return the failure of each reception that the actions report as failed, by request id."""
    return {a.request_id: a.failure for a in actions if isinstance(a, Received) and a.failure is not None}


def sends(actions: Sequence[object]) -> list[Send]:
    """Return the actions, which must be messages to send, as messages."""
    found = [action for action in actions if isinstance(action, Send)]
    assert found == list(actions)
    return found


def offers(actions: Sequence[object]) -> list[Offer]:
    """Return the sent messages, which must be offers."""
    found = [send.message for send in sends(actions) if isinstance(send.message, Offer)]
    assert len(found) == len(actions)
    return found


def cancels(*peers: Peer) -> list[Send]:
    return [Send(peer, Cancel("t", 1)) for peer in peers]


def empty(consumer: Consumer) -> bool:
    return not any(consumer.counts().values()) and not consumer.suspects()
