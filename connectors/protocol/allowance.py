"""What consumers may make a producer rank remember.

MAX_EARLY transfers whose requests have not come, beyond which a consumer is not answered at all (an answer would be a
licence, and nothing would remember that it was given), and open offers of as many blocks as its pool has.
"""

from __future__ import annotations

from collections import Counter

from connectors.protocol.delivery import Delivery, Stage, Transfer
from connectors.protocol.wire import Offer, Peer

MAX_EARLY = 1024
"""Transfers of one consumer engine whose requests have not come yet; honest ones wait for milliseconds."""


class Allowance:
    """``early`` counts those transfers by the consumer's incarnation, ``blocks`` what is on offer by consumer rank."""

    def __init__(self) -> None:
        self.early: Counter[str] = Counter()
        self.blocks: Counter[Peer] = Counter()

    def count_early(self, transfer: Transfer, change: int) -> None:
        """One transfer more or fewer, if its request has not come."""
        if transfer.stage is Stage.EARLY and transfer.consumer is not None:
            self.early[transfer.consumer] += change
            if not self.early[transfer.consumer]:
                del self.early[transfer.consumer]

    def take_offer(self, delivery: Delivery, offer: Offer, pool_blocks: int) -> bool:
        """Take an offer for a delivery. Blocks are on offer once at a time, so no engine has more than its pool."""
        count = sum(map(len, offer.groups))
        if self.blocks[delivery.peer] + count > pool_blocks:
            return False
        delivery.offer, delivery.offered_blocks = offer, count
        self.blocks[delivery.peer] += count
        return True

    def give_back(self, delivery: Delivery) -> None:
        """The delivery is closed."""
        self.blocks[delivery.peer] -= delivery.offered_blocks
        if not self.blocks[delivery.peer]:
            del self.blocks[delivery.peer]
