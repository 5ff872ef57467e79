"""Select the blocks and units of a request that a transfer or a load from the KV store must fill.

position  index into a group's block table; position ``p`` covers tokens ``[p*B, (p+1)*B)`` of the
          request, ``B`` being the block size in tokens
unit      largest range of tokens that lies in one block and one kernel block on both sides; unit
          ``u`` covers tokens ``[u*U, (u+1)*U)``, and ``U`` divides both block sizes

Block id 0 is the allocator's null block, a placeholder in block tables, for example before the
window. A state group has one position and one unit, both 0: the state itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from connectors.errors import PlanError
from connectors.planning.layout import Group, GroupKind

NULL_BLOCK = 0

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BlockSet:
    """Blocks of one group to fill: ascending positions and block ids, both of shape (N,)."""

    positions: Ints
    ids: Ints

    def __post_init__(self) -> None:
        if self.positions.shape != self.ids.shape or self.positions.ndim != 1:
            raise PlanError("BlockSet: positions and ids must be vectors of equal length")

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class UnitShape:
    """Units of one group between two ranks: tokens per unit, and units per block of each side."""

    tokens: int
    src_units: int
    dst_units: int


@dataclass(frozen=True, slots=True)
class UnitSet:
    """Units of one group to fill at the consumer; three vectors of shape (N,).

    ``units``      unit numbers within the request
    ``dst_ids``    consumer's block of each unit
    ``dst_parts``  index of each unit within that block
    """

    units: Ints
    dst_ids: Ints
    dst_parts: Ints

    def __len__(self) -> int:
        return len(self.units)

    def where(self, mask: npt.NDArray[np.bool_] | slice) -> UnitSet:
        return UnitSet(self.units[mask], self.dst_ids[mask], self.dst_parts[mask])


def empty_blocks() -> BlockSet:
    return BlockSet(np.empty(0, np.int64), np.empty(0, np.int64))


def first_needed_token(group: Group, resume_token: int) -> int:
    """Return the oldest token that attention reads to compute token ``resume_token``.

    0 for full attention and for states.
    """
    if group.kind is GroupKind.SLIDING:
        assert group.window_tokens is not None
        return max(0, resume_token - group.window_tokens + 1)
    if group.kind is GroupKind.CHUNKED:
        assert group.window_tokens is not None
        return resume_token // group.window_tokens * group.window_tokens
    return 0


def wanted_blocks(group: Group, table: Sequence[int], start_token: int, end_token: int) -> BlockSet:
    """Return the blocks of ``table`` to fill so that a consumer can compute from ``end_token`` on.

    Tokens before ``start_token`` are in the consumer's prefix cache, whose blocks other requests
    may share, or come from the KV store: the result has no block before that of ``start_token``.
    For a state group, it is the block that holds the state after ``end_token`` tokens, at position
    0.

    Raises PlanError unless ``0 <= start_token <= end_token``, or if the table has no block for a
    needed token. The engine must then compute the tokens itself.
    """
    if not 0 <= start_token <= end_token:
        raise PlanError(f"start_token {start_token} must be between 0 and end_token {end_token}")
    if group.kind is GroupKind.STATE:
        if start_token == end_token:
            return empty_blocks()
        position = state_position(group, end_token)
        if position >= len(table) or table[position] == NULL_BLOCK:
            raise PlanError(f"group {group.index}: the block of the state after {end_token} tokens is not allocated")
        return BlockSet(np.zeros(1, np.int64), np.asarray(table[position : position + 1], np.int64))
    first = max(first_needed_token(group, end_token), start_token) // group.block_tokens
    stop = -(-end_token // group.block_tokens)
    if start_token == end_token or first_needed_token(group, end_token) >= end_token or first >= stop:
        return empty_blocks()
    if stop > len(table):
        raise PlanError(
            f"group {group.index}: the block table has {len(table)} blocks, but {end_token} tokens need {stop} blocks"
        )
    ids = np.asarray(table[first:stop], np.int64)
    if (ids == NULL_BLOCK).any():
        missing = first + int(np.flatnonzero(ids == NULL_BLOCK)[0])
        raise PlanError(f"group {group.index}: the needed block at position {missing} is not allocated")
    return BlockSet(np.arange(first, stop, dtype=np.int64), ids)


def state_position(group: Group, end_token: int) -> int:
    return (end_token - 1) // group.block_tokens


def wanted_units(group: Group, blocks: BlockSet, shape: UnitShape, end_token: int) -> UnitSet:
    """Return the units of ``blocks`` to write for a consumer that computes from ``end_token`` on.

    Omits units before the producer's block in which the window starts. It keeps the units of
    ``blocks`` between the start of that block and the window: a consumer with prefix caching may
    reuse its own first block as a whole. Producer and consumer both call this function, so they
    count the same bytes.
    """
    if group.kind is GroupKind.STATE:
        return UnitSet(blocks.positions, blocks.ids, np.zeros(len(blocks), np.int64))
    parts = np.arange(shape.dst_units, dtype=np.int64)
    units = (blocks.positions[:, None] * shape.dst_units + parts[None, :]).ravel()
    every = UnitSet(units, np.repeat(blocks.ids, shape.dst_units), np.tile(parts, len(blocks)))
    held_tokens = shape.src_units * shape.tokens
    first = first_needed_token(group, end_token) // held_tokens * held_tokens
    needed = (units * shape.tokens < end_token) & (units * shape.tokens >= first)
    return every.where(needed)


def offered_units(
    groups: Sequence[Group], blocks: Sequence[BlockSet], shapes: Sequence[UnitShape], end_token: int
) -> list[UnitSet]:
    return [wanted_units(*each, end_token) for each in zip(groups, blocks, shapes, strict=True)]


def complete_units(group: Group, units: Ints, shape: UnitShape, computed: int, end_token: int) -> npt.NDArray[np.bool_]:
    """Return a mask of the units whose tokens below ``end_token`` are all computed.

    The last unit may extend past ``end_token``. A state is complete when exactly ``end_token``
    tokens have been computed: later tokens change it.
    """
    if group.kind is GroupKind.STATE:
        return np.full(len(units), computed == end_token)
    return np.minimum((units + 1) * shape.tokens, end_token) <= computed
