"""One transfer at its producer, the units to write, limits on consumers. For ``producer.py``."""

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
    offered_units,
    state_position,
    wanted_units,
)
from connectors.planning.descriptors import Moves
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.actions import Digest
from connectors.protocol.agent_metadata import NO_PROCESS, ProcessIdentity
from connectors.protocol.wire import Message, Offer, Peer


@dataclass(frozen=True, slots=True)
class ConsumerPeer:
    """Producer's record of a consumer worker after its Hello.

    ``partner_ranks``  ranks of the consumer engine that exchange messages with this producer rank
    ``new_digest``     creates the digest of one transfer at this end
    ``was_seen``       as in ``Partner``
    """

    partner_ranks: frozenset[int]
    num_blocks: int
    shapes: tuple[UnitShape, ...]
    new_digest: Callable[[], Digest] | None = None
    process: ProcessIdentity = NO_PROCESS
    was_seen: bool = False


class Stage(Enum):
    """``producer.py`` has the transition table."""

    EARLY = auto()
    LIVE = auto()
    HELD = auto()


EVERY_LAYER = 2**31

MAX_EARLY = 1024
"""Limit of early transfers per consumer engine; requests usually follow within milliseconds."""

NO_CONSUMER = ""
"""Consumer of a discarded transfer. A peer's incarnation is never empty."""


@dataclass(slots=True)
class Delivery:
    """The part of a transfer that one consumer rank receives from this rank.

    ``awaits_start``    True from AwaitStart to the offer
    ``offer``           the consumer's Offer, until the delivery is closed
    ``pending``         offered units not yet in a write, by group; None until the offer has been
                        checked against the prefill request, and once the delivery ends
    ``early``           units that the current step completes, and the number of their layers
                        already in a write, by group
    ``in_flight``       bytes of each unfinished write, by write id; 0 until it has been posted
    ``left``            number of units of each group not in a write with all their layers when a
                        write began, by its id, until ``arrived`` has seen its end
    ``unarrived``       number of units of each group that have not arrived, as last reported
    ``ending``          final message, sent when no write is in flight, unless a write has failed or
                        the consumer has ended
    ``last_sent``       time of the last AwaitStart, Offer, Starting or Alive; alive_s counts from
                        it
    ``offered_blocks``  blocks in the offer, counted against the consumer's pool until it is closed
    ``moved_at``        time at which a write was last started or completed, in seconds
    ``hangs``           True once writes in flight have made no progress for hang_s
    """

    peer: Peer
    awaits_start: bool = False
    offer: Offer | None = None
    pending: list[UnitSet] | None = None
    early: dict[int, tuple[Moves, int]] = field(default_factory=dict)
    digest: Digest | None = None
    in_flight: dict[int, int] = field(default_factory=dict)
    left: dict[int, tuple[int, ...]] = field(default_factory=dict)
    unarrived: tuple[int, ...] = ()
    written_bytes: int = 0
    ending: Message | None = None
    closed: bool = False
    last_sent: float = 0.0
    offered_blocks: int = 0
    moved_at: float = 0.0
    hangs: bool = False

    def taken(self, transfer: Transfer) -> bool:
        """Return whether the delivery is complete, or the whole prompt has been computed."""
        assert self.offer is not None
        left = bool(self.early) or (self.pending is not None and any(map(len, self.pending)))
        if left and not any(transfer.tables):
            return False  # preempted: the engine recomputes what is left
        return transfer.computed_tokens >= (transfer.prompt_tokens if left else self.offer.end_token)

    def begin_write(self, write_id: int, now: float) -> None:
        left = [len(units) for units in self.pending or ()]
        for group, (moves, _) in self.early.items():
            left[group] += len(moves)
        self.left[write_id] = tuple(left)
        self.in_flight[write_id] = 0
        self.moved_at = now

    def arrived(self) -> tuple[int, ...]:
        """Return the new ``unarrived``; empty if it has not changed since the last call."""
        ended = [self.left.pop(each) for each in sorted(self.left) if each < min(self.in_flight, default=each + 1)]
        before, self.unarrived = self.unarrived, (ended or [self.unarrived])[-1]
        return self.unarrived if self.unarrived != before else ()

    def missing(self) -> str | None:
        """Only a state can be left: the engine computed past ``offer.end_token`` and changed it."""
        assert self.offer is not None
        groups = [str(group) for group, units in enumerate(self.pending or ()) if len(units)]
        if not groups:
            return None
        return f"KV cache groups {', '.join(groups)}: prefill computed past the token whose state decode requested"


@dataclass(slots=True)
class Gone:
    """End of a transfer or discard of an unknown id, and each worker's highest message number."""

    at: float
    numbers: dict[Peer, int] = field(default_factory=dict)


@dataclass(slots=True)
class Transfer:
    """One request's KV for one consumer engine.

    ``since``            time of the last change of stage, in seconds
    ``request_id``       the prefill request; None before it arrives and after its end
    ``prompt_tokens``    tokens whose KV this engine computes for the consumer
    ``coming_tokens``    tokens whose KV will have been computed after the current step; 0 outside a
                         step that reports computed layers
    ``consumer``         incarnation of the consumer engine; None until its first message,
                         NO_CONSUMER after a discard
    ``expected_ranks``   consumer ranks that this rank serves; None until the first message, empty
                         if the KV is not sent
    ``check_at``         time before which no deadline passes, in seconds
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
        return (
            self.expected_ranks is not None
            and self.expected_ranks <= self.deliveries.keys()
            and all(delivery.closed for delivery in self.deliveries.values())
        )


class Allowance:
    """Limits on the state that consumers can create in a producer rank.

    ``early``   number of transfers whose requests have not arrived, by consumer incarnation. At
                MAX_EARLY, the producer ignores messages about unknown transfers: an answer lets the
                consumer reuse blocks, so the producer would have to keep a record of the answer
    ``blocks``  number of blocks in open offers, by consumer worker; at most the size of its pool
    """

    def __init__(self) -> None:
        self.early: Counter[str] = Counter()
        self.blocks: Counter[Peer] = Counter()

    def count_early(self, transfer: Transfer, change: int) -> None:
        if transfer.stage is Stage.EARLY and transfer.consumer is not None:
            self.early[transfer.consumer] += change
            if not self.early[transfer.consumer]:
                del self.early[transfer.consumer]

    def take_offer(self, delivery: Delivery, offer: Offer, pool_blocks: int) -> bool:
        """Accept an offer, unless open offers would then exceed the consumer's pool."""
        count = sum(map(len, offer.groups))
        if self.blocks[delivery.peer] + count > pool_blocks:
            return False
        delivery.offer, delivery.offered_blocks = offer, count
        self.blocks[delivery.peer] += count
        return True

    def give_back(self, delivery: Delivery) -> None:
        """Call this once per closed delivery."""
        self.blocks[delivery.peer] -= delivery.offered_blocks
        if not self.blocks[delivery.peer]:
            del self.blocks[delivery.peer]


def offer_problem(transfer: Transfer, offer: Offer, groups: Sequence[Group], consumer: ConsumerPeer) -> str | None:
    if offer.digest and consumer.new_digest is None:
        return "the offer requests a digest, but this prefill worker computes no digests"
    if offer.prompt_digest != transfer.prompt_digest:
        return (
            "the two requests of this transfer have different prompts, perhaps because the chat template renders "
            "the time (strftime_now)"
        )
    if offer.end_token > transfer.prompt_tokens:
        return f"the offer is for {offer.end_token} tokens, but prefill sends {transfer.prompt_tokens}"
    if len(offer.groups) != len(groups):
        return f"the offer has {len(offer.groups)} KV cache groups, but the model has {len(groups)}"
    for group, blocks, shape in zip(groups, offer.groups, consumer.shapes, strict=True):
        if not len(blocks):
            continue
        if int(blocks.ids.max()) >= consumer.num_blocks:
            return f"block {int(blocks.ids.max())} does not exist in the consumer's pool"
        if group.kind is GroupKind.STATE:
            if blocks.positions.tolist() != [0]:
                return (
                    f"group {group.index} has one state per request: the offer must have one block, at position 0, "
                    f"not {len(blocks)} blocks"
                )
            continue
        if int(blocks.positions[-1]) * shape.tokens * shape.dst_units >= offer.end_token:
            return f"a block of group {group.index} lies after the last requested token"
        kept = first_needed_token(group, transfer.prompt_tokens) // group.block_tokens * group.block_tokens
        units = wanted_units(group, blocks, shape, offer.end_token).units
        if len(units) and int(units[0]) * shape.tokens < kept:
            # The block table still has the block, but the allocator may have given it to another
            # request.
            return f"a block of group {group.index} lies before the window at the end of the prompt"
    return None


def take(
    transfer: Transfer, delivery: Delivery, offer: Offer, groups: Sequence[Group], consumer: ConsumerPeer | None
) -> tuple[str | None, list[Moves]]:
    """Return (why the offer cannot be served, or None; the moves, which the caller must write)."""
    if consumer is None:
        return "the consumer worker has ended or has been removed", []
    if delivery.pending is None:
        problem = offer_problem(transfer, offer, groups, consumer)
        if problem is not None:
            return problem, []
        delivery.pending = offered_units(groups, offer.groups, consumer.shapes, offer.end_token)
        delivery.unarrived = tuple(map(len, delivery.pending))
        if offer.digest and consumer.new_digest is not None:
            delivery.digest = consumer.new_digest()
    moves = take_ready(transfer, delivery, groups, consumer)
    if moves is None:
        return "the prefill engine has freed a requested block", []
    return None, moves


def take_ready(
    transfer: Transfer, delivery: Delivery, groups: Sequence[Group], consumer: ConsumerPeer
) -> list[Moves] | None:
    """Take the pending units that are computed; None if a source block has been freed. Once a step
    has ended, the moves include the remaining layers of units of ``take_layers``.
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
    """Do as ``take_ready`` for the first ``stop`` layers of the units that this step completes."""
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
    """Take a group's pending units that ``computed_tokens`` complete, in at most one move; None as
    ``take_ready``.

    The prompt's last unit is complete once all its prompt tokens are computed, also those from
    ``end_token`` on: the engine would otherwise write KV into it while the transfer reads it.
    """
    assert delivery.offer is not None
    assert delivery.pending is not None
    shape, table, pending = consumer.shapes[group.index], transfer.tables[group.index], delivery.pending[group.index]
    if not len(pending):
        return []
    if group.kind is GroupKind.STATE:
        ready = complete_units(group, pending.units, shape, computed_tokens, delivery.offer.end_token)
        positions = np.full(len(pending), state_position(group, delivery.offer.end_token))
    else:
        ready = complete_units(group, pending.units, shape, computed_tokens, transfer.prompt_tokens)
        positions = pending.units // shape.src_units
    ready &= (positions < len(table)) & (positions >= 0)
    if not ready.any():
        return []
    taken = pending.where(ready)
    src_ids = np.asarray(table, np.int64)[positions[ready]]
    if (src_ids == NULL_BLOCK).any():
        return None
    delivery.pending[group.index] = pending.where(~ready)
    return [Moves(group.index, src_ids, taken.units % shape.src_units, taken.dst_ids, taken.dst_parts)]
