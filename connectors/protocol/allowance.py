"""Limits on the state that consumers can create in a producer rank.

Per consumer engine: MAX_EARLY transfers whose requests have not arrived, and open offers of as many blocks as its pool
has. Beyond MAX_EARLY the producer does not answer: an answer would permit an offer of which it keeps no record.
"""

from __future__ import annotations

from collections import Counter

from connectors.protocol.delivery import Delivery, Stage, Transfer
from connectors.protocol.wire import Offer, Peer

MAX_EARLY = 1024
"""Transfers of one consumer engine whose requests have not arrived; a legitimate one waits for milliseconds."""


class Allowance:
    """``early`` counts those transfers by consumer incarnation, ``blocks`` the offered blocks by consumer rank."""

    def __init__(self) -> None:
        self.early: Counter[str] = Counter()
        self.blocks: Counter[Peer] = Counter()

    def count_early(self, transfer: Transfer, change: int) -> None:
        """Add ``change`` to the consumer's count if the transfer's request has not arrived."""
        if transfer.stage is Stage.EARLY and transfer.consumer is not None:
            self.early[transfer.consumer] += change
            if not self.early[transfer.consumer]:
                del self.early[transfer.consumer]

    def take_offer(self, delivery: Delivery, offer: Offer, pool_blocks: int) -> bool:
        """Accept an offer for a delivery unless the rank would then offer more blocks than its pool has."""
        count = sum(map(len, offer.groups))
        if self.blocks[delivery.peer] + count > pool_blocks:
            return False
        delivery.offer, delivery.offered_blocks = offer, count
        self.blocks[delivery.peer] += count
        return True

    def give_back(self, delivery: Delivery) -> None:
        """Subtract the blocks of a closed delivery."""
        self.blocks[delivery.peer] -= delivery.offered_blocks
        if not self.blocks[delivery.peer]:
            del self.blocks[delivery.peer]
