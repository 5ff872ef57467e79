"""One transfer as its producer sees it: the state, and what of it can be written now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from connectors.planning.blocks import NULL_BLOCK, BlockSet, complete_positions, first_needed_token
from connectors.planning.descriptors import BlockMoves
from connectors.planning.layout import Group
from connectors.protocol.wire import Message, Offer, Peer


@dataclass(frozen=True, slots=True)
class Consumer:
    """What the producer knows of a consumer worker after its Hello.

    ``partner_ranks`` are the ranks of that engine which talk to this producer rank, ``num_blocks`` its pool's size.
    """

    partner_ranks: frozenset[int]
    num_blocks: int


class Stage(Enum):
    """Of a transfer; the producer's transition table says what leads where."""

    ORPHAN = auto()
    LIVE = auto()
    HELD = auto()


NOBODY = ""
"""The consumer of a transfer that was discarded: no peer's incarnation is empty."""


@dataclass(slots=True)
class Delivery:
    """One consumer rank's share. ``pending[g]`` are the offered blocks of group g that have not been written yet.

    ``in_flight`` are the writes under way and their bytes; ``moved_at`` is when one was last posted or done.
    """

    peer: Peer
    offer: Offer | None = None
    pending: list[BlockSet] = field(default_factory=list)
    in_flight: dict[int, int] = field(default_factory=dict)
    written_bytes: int = 0
    ending: Message | None = None
    closed: bool = False
    last_sent: float = 0.0
    moved_at: float = 0.0


@dataclass(slots=True)
class Transfer:
    """One request's KV for one consumer engine. ``tables[g]`` is group g's block table, as far as it is known."""

    transfer_id: str
    stage: Stage
    since: float
    request_id: str | None = None
    prompt_tokens: int = 0
    prompt_digest: str = ""
    computed_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    consumer: str | None = None
    expected_ranks: frozenset[int] | None = None
    deliveries: dict[int, Delivery] = field(default_factory=dict)

    def delivered(self) -> bool:
        """Every rank of the consumer that was to be served has been, or wants nothing, and no write is under way."""
        return (
            self.expected_ranks is not None
            and self.expected_ranks <= self.deliveries.keys()
            and all(delivery.closed for delivery in self.deliveries.values())
        )


def offer_problem(transfer: Transfer, offer: Offer, groups: Sequence[Group], consumer: Consumer | None) -> str | None:
    """Why an offer cannot be served at all."""
    if offer.prompt_digest != transfer.prompt_digest:
        return "the two requests of this transfer have different prompts"
    if offer.end_token > transfer.prompt_tokens:
        return f"{offer.end_token} tokens are wanted of a prompt of {transfer.prompt_tokens}"
    if len(offer.groups) != len(groups):
        return f"blocks are offered for {len(offer.groups)} KV cache groups, the model has {len(groups)}"
    if consumer is None:
        return "the consumer is gone"
    for group, blocks in zip(groups, offer.groups, strict=True):
        if not len(blocks):
            continue
        if int(blocks.ids.max()) >= consumer.num_blocks:
            return f"block {int(blocks.ids.max())} does not exist in the consumer's pool"
        if int(blocks.positions[-1]) * group.block_tokens >= offer.end_token:
            return f"a block of group {group.index} lies behind the last token that is wanted"
        kept = first_needed_token(group, max(0, transfer.prompt_tokens - 1)) // group.block_tokens
        if int(blocks.positions[0]) < kept:
            # The table still names it, but the allocator may have given it to another request.
            return f"a block of group {group.index} lies before the window that the prompt ends with"
    return None


def take_ready(transfer: Transfer, delivery: Delivery, groups: Sequence[Group]) -> list[BlockMoves] | None:
    """Take the pending blocks whose tokens are all computed. None where a source block is gone for good."""
    assert delivery.offer is not None
    moves: list[BlockMoves] = []
    for group, table in zip(groups, transfer.tables, strict=True):
        pending = delivery.pending[group.index]
        if not len(pending):
            continue
        ready = complete_positions(
            pending.positions, group.block_tokens, transfer.computed_tokens, delivery.offer.end_token
        ) & (pending.positions < len(table))
        if not ready.any():
            continue
        positions = pending.positions[ready]
        src_ids = np.fromiter((table[p] for p in positions.tolist()), np.int64, len(positions))
        if (src_ids == NULL_BLOCK).any():
            return None
        moves.append(BlockMoves(group.index, src_ids, pending.ids[ready]))
        delivery.pending[group.index] = BlockSet(pending.positions[~ready], pending.ids[~ready])
    return moves
