"""A transfer at its producer: its state, what can be written now, and bounds on consumers' claims."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

import numpy as np

from connectors.planning.blocks import (
    NULL_BLOCK,
    UnitSet,
    UnitShape,
    complete_units,
    first_needed_token,
    state_position,
    wanted_units,
)
from connectors.planning.descriptors import Moves
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.actions import Digest
from connectors.protocol.wire import Message, Offer, Peer


@dataclass(frozen=True, slots=True)
class ConsumerPeer:
    """Producer's record of a consumer worker after its Hello.

    ``partner_ranks`` are the ranks of that engine which talk to this producer rank, ``num_blocks`` its pool's size,
    ``shapes[g]`` how blocks of group g are cut between the two. ``new_digest`` makes the digest of one transfer to it;
    None where this engine makes none.
    """

    partner_ranks: frozenset[int]
    num_blocks: int
    shapes: tuple[UnitShape, ...]
    new_digest: Callable[[], Digest] | None = None


class Stage(Enum):
    """Stage of a transfer; ``producer.py`` has the transitions."""

    EARLY = auto()
    LIVE = auto()
    HELD = auto()


EVERY_LAYER = 2**31
"""More layers than any group has."""

MAX_EARLY = 1024
"""Transfers of one consumer engine whose requests have not come yet; honest ones wait for milliseconds."""

NOBODY = ""
"""The consumer of a transfer that was discarded: no peer's incarnation is empty."""


@dataclass(slots=True)
class Delivery:
    """One consumer rank's share. It ``awaits_start`` from AwaitStart to the offer.

    ``pending[g]`` are the offered units of group g that have not been written yet, once the offer has been found to fit
    the request; ``digest`` is made then, if one is asked for. ``early[g]`` are units of group g that the step under way
    completes, and how many layers of them have been written. ``in_flight`` are the writes under way and their bytes;
    ``moved_at`` is when one was last posted or done; ``hangs`` once none has for too long. ``offered_blocks`` count
    against the consumer's pool until it is closed.
    """

    peer: Peer
    awaits_start: bool = False
    offer: Offer | None = None
    pending: list[UnitSet] | None = None
    early: dict[int, tuple[Moves, int]] = field(default_factory=dict)
    digest: Digest | None = None
    in_flight: dict[int, int] = field(default_factory=dict)
    written_bytes: int = 0
    ending: Message | None = None
    closed: bool = False
    last_sent: float = 0.0
    offered_blocks: int = 0
    moved_at: float = 0.0
    hangs: bool = False

    def taken(self, transfer: Transfer) -> bool:
        """Nothing is left to be written: all that was offered has been, or the prompt has ended without the rest."""
        assert self.offer is not None
        left = bool(self.early) or (self.pending is not None and any(map(len, self.pending)))
        return transfer.computed_tokens >= (transfer.prompt_tokens if left else self.offer.end_token)

    def missing(self) -> str | None:
        """Return what is missing at the prompt's end: a state at the token where the consumer resumes."""
        assert self.offer is not None
        groups = [str(group) for group, units in enumerate(self.pending or ()) if len(units)]
        if not groups:
            return None
        return f"the prompt was computed past what is wanted of KV cache groups {', '.join(groups)}"


@dataclass(slots=True)
class Gone:
    """Record of an ended transfer: when it ended, and the offer numbers that it used."""

    at: float
    numbers: dict[Peer, int] = field(default_factory=dict)


@dataclass(slots=True)
class Transfer:
    """One request's KV for one consumer engine. ``tables[g]`` is group g's block table, as far as it is known.

    ``starting`` once the scheduler is about to start the prompt. ``coming_tokens`` will be computed when the step under
    way is. ``numbers`` are the highest that consumer workers
    have named with this transfer. No deadline passes before ``check_at``.
    """

    transfer_id: str
    stage: Stage
    since: float
    request_id: str | None = None
    prompt_tokens: int = 0
    prompt_digest: str = ""
    starting: bool = False
    computed_tokens: int = 0
    coming_tokens: int = 0
    tables: list[list[int]] = field(default_factory=list)
    consumer: str | None = None
    expected_ranks: frozenset[int] | None = None
    deliveries: dict[int, Delivery] = field(default_factory=dict)
    numbers: dict[Peer, int] = field(default_factory=dict)
    check_at: float = float("-inf")

    def delivered(self) -> bool:
        """Every rank of the consumer that was to be served has been, or wants nothing, and no write is under way."""
        return (
            self.expected_ranks is not None
            and self.expected_ranks <= self.deliveries.keys()
            and all(delivery.closed for delivery in self.deliveries.values())
        )


class Allowance:
    """What consumers may make a producer rank remember.

    ``early``   transfers whose requests have not come, by the consumer's incarnation. Beyond MAX_EARLY of them a
                consumer is not answered at all: an answer permits it to reuse blocks and must be remembered
    ``blocks``  blocks in open offers, by consumer rank: at most as many as its pool has
    """

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


def offer_problem(transfer: Transfer, offer: Offer, groups: Sequence[Group], consumer: ConsumerPeer) -> str | None:
    """Why an offer cannot be served at all."""
    if offer.digest and consumer.new_digest is None:
        return "a digest is wanted, and this engine makes none"
    if offer.prompt_digest != transfer.prompt_digest:
        return "the two requests of this transfer have different prompts"
    if offer.end_token > transfer.prompt_tokens:
        return f"{offer.end_token} tokens are wanted of a prompt of {transfer.prompt_tokens}"
    if len(offer.groups) != len(groups):
        return f"blocks are offered for {len(offer.groups)} KV cache groups, the model has {len(groups)}"
    for group, blocks, shape in zip(groups, offer.groups, consumer.shapes, strict=True):
        if not len(blocks):
            continue
        if int(blocks.ids.max()) >= consumer.num_blocks:
            return f"block {int(blocks.ids.max())} does not exist in the consumer's pool"
        if group.kind is GroupKind.STATE:
            if blocks.positions.tolist() != [0]:
                return f"group {group.index} has one state a request, blocks are offered for {len(blocks)}"
            continue
        if int(blocks.positions[-1]) * shape.tokens * shape.dst_units >= offer.end_token:
            return f"a block of group {group.index} lies behind the last token that is wanted"
        kept = first_needed_token(group, transfer.prompt_tokens) // group.block_tokens * group.block_tokens
        units = wanted_units(group, blocks, shape, offer.end_token).units
        if len(units) and int(units[0]) * shape.tokens < kept:
            # The table still names it, but the allocator may have given it to another request.
            return f"a block of group {group.index} lies before the window that the prompt ends with"
    return None


def wanted(offer: Offer, groups: Sequence[Group], consumer: ConsumerPeer) -> list[UnitSet]:
    """The units of an offer, by group."""
    return [
        wanted_units(group, blocks, shape, offer.end_token)
        for group, blocks, shape in zip(groups, offer.groups, consumer.shapes, strict=True)
    ]


def take(
    transfer: Transfer, delivery: Delivery, offer: Offer, groups: Sequence[Group], consumer: ConsumerPeer | None
) -> tuple[str | None, list[Moves]]:
    """Return the moves that can be written now for an offer, or the reason why it cannot be served."""
    if consumer is None:
        return "the consumer is gone", []
    if delivery.pending is None:
        problem = offer_problem(transfer, offer, groups, consumer)
        if problem is not None:
            return problem, []
        delivery.pending = wanted(offer, groups, consumer)
        if offer.digest and consumer.new_digest is not None:
            delivery.digest = consumer.new_digest()
    moves = take_ready(transfer, delivery, groups, consumer)
    if moves is None:
        return "the prefill engine no longer holds a block that is wanted", []
    return None, moves


def take_ready(
    transfer: Transfer, delivery: Delivery, groups: Sequence[Group], consumer: ConsumerPeer
) -> list[Moves] | None:
    """Take the pending units whose tokens are all computed. None where a source block is gone for good.

    Of units that leave layer by layer it is the layers that have not left, once the step that computes them has ended.
    """
    moves: list[Moves] = []
    if not transfer.coming_tokens:
        moves = [replace(early, layers=(done, EVERY_LAYER)) for early, done in delivery.early.values()]
        delivery.early.clear()
    for group in groups:
        taken = _take(transfer, delivery, group, consumer, transfer.computed_tokens)
        if taken is None:
            return None
        moves += taken
    return moves


def take_layers(
    transfer: Transfer, delivery: Delivery, group: Group, consumer: ConsumerPeer, stop: int
) -> list[Moves] | None:
    """Take layers below ``stop`` of a group's units that the step under way completes, as far as they are not taken."""
    if group.index not in delivery.early:
        taken = _take(transfer, delivery, group, consumer, transfer.coming_tokens)
        if not taken:
            return taken
        delivery.early[group.index] = (taken[0], 0)
    early, done = delivery.early[group.index]
    if stop <= done:
        return []
    delivery.early[group.index] = (early, stop)
    return [replace(early, layers=(done, stop))]


def _take(
    transfer: Transfer, delivery: Delivery, group: Group, consumer: ConsumerPeer, computed_tokens: int
) -> list[Moves] | None:
    """The pending units of one group that ``computed_tokens`` complete, if any.

    The prompt's last unit waits for the token behind ``end_token`` too, if that lies in it: it would be computed into
    the unit while a write reads it.
    """
    assert delivery.offer is not None
    assert delivery.pending is not None
    shape, table, pending = consumer.shapes[group.index], transfer.tables[group.index], delivery.pending[group.index]
    if not len(pending):
        return []
    if group.kind is GroupKind.STATE:
        ready = complete_units(group, pending.units, shape, computed_tokens, delivery.offer.end_token)
        places = np.full(len(pending), state_position(group, delivery.offer.end_token))
    else:
        ready = complete_units(group, pending.units, shape, computed_tokens, transfer.prompt_tokens)
        places = pending.units // shape.src_units
    ready &= (places < len(table)) & (places >= 0)
    if not ready.any():
        return []
    taken = pending.where(ready)
    src_ids = np.asarray(table, np.int64)[places[ready]]
    if (src_ids == NULL_BLOCK).any():
        return None
    delivery.pending[group.index] = pending.where(~ready)
    return [Moves(group.index, src_ids, taken.units % shape.src_units, taken.dst_ids, taken.dst_parts)]
