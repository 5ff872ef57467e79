"""Tokens to blocks: which positions of a block table are wanted, and which a chunk has completed.

A *position* is an index into a group's block table: position ``p`` covers tokens ``[p*B, (p+1)*B)`` of the request.
Block id 0 is the allocator's null block: it stands where a sliding window has passed and nothing is stored.
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


def empty_blocks() -> BlockSet:
    return BlockSet(np.empty(0, np.int64), np.empty(0, np.int64))


def first_needed_token(group: Group, resume_token: int) -> int:
    """The oldest token that attention at ``resume_token`` (the next to be computed) looks at."""
    if group.kind is GroupKind.SLIDING:
        assert group.window_tokens is not None
        return max(0, resume_token - group.window_tokens + 1)
    return 0


def wanted_blocks(group: Group, table: Sequence[int], start_token: int, end_token: int) -> BlockSet:
    """The blocks that must be filled so that a consumer can resume at ``end_token``.

    Tokens before ``start_token`` are already in the consumer's own cache (a prefix hit); their blocks may be shared
    with other requests and are never written. Tokens before the window are not needed.

    Raises PlanError where the table has no block for a token that is needed: the caller then computes it itself.
    """
    if not 0 <= start_token <= end_token:
        raise PlanError(f"tokens [{start_token}, {end_token}) are not a range")
    first = max(first_needed_token(group, end_token), start_token) // group.block_tokens
    stop = -(-end_token // group.block_tokens)
    if start_token == end_token or first >= stop:
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


def complete_positions(
    positions: Ints, block_tokens: int, computed_tokens: int, end_token: int
) -> npt.NDArray[np.bool_]:
    """Mask of the positions whose tokens below ``end_token`` are all computed.

    The last block of a prompt is complete when the prompt is, although it is not full.
    """
    return np.minimum((positions + 1) * block_tokens, end_token) <= computed_tokens


def boundary_position(group: Group, resume_token: int, computed_tokens: int) -> int | None:
    """The table position that resuming at ``resume_token`` needs and computing up to ``computed_tokens`` has released.

    A producer computes the whole prompt, so its window ends one token later than that of a consumer which resumes at
    the last prompt token. Where that token starts a block, the allocator has let go of one block too many.
    None where nothing is lost.
    """
    needed = first_needed_token(group, resume_token) // group.block_tokens
    kept = first_needed_token(group, computed_tokens) // group.block_tokens
    return needed if needed < kept else None
