"""Tokens to blocks, and blocks to what moves: which positions are wanted, and which a chunk has completed.

A *position* is an index into a group's block table: position ``p`` covers tokens ``[p*B, (p+1)*B)`` of the request.
Block id 0 is the allocator's null block: it stands where a sliding window has passed and nothing is stored.
A *unit* is the largest stretch of tokens that lies in one block on both sides: unit ``u`` covers ``[u*U, (u+1)*U)``, U
dividing the block sizes of producer and consumer. A state group has one position and one unit, 0: the state itself.
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
    """Blocks of one group: ``ids[i]`` is the block at table position ``positions[i]``. Positions ascend."""

    positions: Ints
    ids: Ints

    def __post_init__(self) -> None:
        if self.positions.shape != self.ids.shape or self.positions.ndim != 1:
            raise PlanError("positions and ids must be two vectors of one length")

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class UnitShape:
    """Units of one group between two engines: ``tokens`` per unit, and units per block on each side."""

    tokens: int
    src_units: int
    dst_units: int


@dataclass(frozen=True, slots=True)
class UnitSet:
    """Units to fill: ``units[i]`` goes into part ``dst_parts[i]`` of the consumer's block ``dst_ids[i]``."""

    units: Ints
    dst_ids: Ints
    dst_parts: Ints

    def __len__(self) -> int:
        return len(self.units)

    def where(self, mask: npt.NDArray[np.bool_]) -> UnitSet:
        return UnitSet(self.units[mask], self.dst_ids[mask], self.dst_parts[mask])


def empty_blocks() -> BlockSet:
    return BlockSet(np.empty(0, np.int64), np.empty(0, np.int64))


def first_needed_token(group: Group, resume_token: int) -> int:
    """The oldest token that attention at ``resume_token`` (the next to be computed) looks at."""
    if group.kind is GroupKind.SLIDING:
        assert group.window_tokens is not None
        return max(0, resume_token - group.window_tokens + 1)
    if group.kind is GroupKind.CHUNKED:
        assert group.window_tokens is not None
        return resume_token // group.window_tokens * group.window_tokens
    return 0


def wanted_blocks(group: Group, table: Sequence[int], start_token: int, end_token: int) -> BlockSet:
    """The blocks that must be filled so that a consumer can resume at ``end_token``.

    Tokens before ``start_token`` are already in the consumer's own cache (a prefix hit); their blocks may be shared
    with other requests and are never written. Tokens before the window are not needed. Of a state group it is the
    block of the state after ``end_token`` tokens, at position 0 whatever its position here.

    Raises PlanError where the table has no block for a token that is needed: the caller then computes it itself.
    """
    if not 0 <= start_token <= end_token:
        raise PlanError(f"tokens [{start_token}, {end_token}) are not a range")
    if group.kind is GroupKind.STATE:
        return _state_block(group, table, end_token) if start_token < end_token else empty_blocks()
    first = max(first_needed_token(group, end_token), start_token) // group.block_tokens
    stop = -(-end_token // group.block_tokens)
    if start_token == end_token or first_needed_token(group, end_token) >= end_token or first >= stop:
        return empty_blocks()
    if stop > len(table):
        raise PlanError(
            f"group {group.index}: the block table has {len(table)} blocks, tokens up to {end_token} need {stop}"
        )
    ids = np.asarray(table[first:stop], np.int64)
    if (ids == NULL_BLOCK).any():
        missing = first + int(np.flatnonzero(ids == NULL_BLOCK)[0])
        raise PlanError(f"group {group.index}: no block is allocated at position {missing}, which is needed")
    return BlockSet(np.arange(first, stop, dtype=np.int64), ids)


def state_position(group: Group, end_token: int) -> int:
    """Return the index in a state group's block table of the state after ``end_token`` tokens."""
    return (end_token - 1) // group.block_tokens


def _state_block(group: Group, table: Sequence[int], end_token: int) -> BlockSet:
    position = state_position(group, end_token)
    if position >= len(table) or table[position] == NULL_BLOCK:
        raise PlanError(f"group {group.index}: no block is allocated for the state after {end_token} tokens")
    return BlockSet(np.zeros(1, np.int64), np.asarray(table[position : position + 1], np.int64))


def wanted_units(group: Group, blocks: BlockSet, shape: UnitShape, end_token: int) -> UnitSet:
    """The units of a consumer's blocks that carry tokens it needs to resume at ``end_token``.

    The block in which the window begins is filled as far as the producer holds it, from the beginning of the
    producer's own block: a consumer that caches prefixes takes a full block for a whole one. The last block may end
    behind the prompt. Both sides compute this, so both count the same bytes.
    """
    if group.kind is GroupKind.STATE:
        return UnitSet(blocks.positions, blocks.ids, np.zeros(len(blocks), np.int64))
    parts = np.arange(shape.dst_units, dtype=np.int64)
    units = (blocks.positions[:, None] * shape.dst_units + parts[None, :]).ravel()
    every = UnitSet(units, np.repeat(blocks.ids, shape.dst_units), np.tile(parts, len(blocks)))
    held_tokens = shape.src_units * shape.tokens
    first = first_needed_token(group, end_token) // held_tokens * held_tokens
    return every.where((units * shape.tokens < end_token) & (units * shape.tokens >= first))


def complete_units(group: Group, units: Ints, shape: UnitShape, computed: int, end_token: int) -> npt.NDArray[np.bool_]:
    """Mask of the units whose tokens below ``end_token`` are all computed.

    The last unit of a prompt is complete when the prompt is, although it is not full. A state is the prompt's when
    exactly ``end_token`` tokens are in it.
    """
    if group.kind is GroupKind.STATE:
        return np.full(len(units), computed == end_token)
    return np.minimum((units + 1) * shape.tokens, end_token) <= computed
