"""Plans applied to block ids: vectors of (source, destination, bytes), coalesced.

Nothing here makes a Python object per block: a transfer of 10,000 blocks is a handful of numpy operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from connectors.errors import PlanError
from connectors.planning.blocks import Ints
from connectors.planning.plan import GroupPlan, PairPlan


@dataclass(frozen=True, slots=True)
class Runs:
    """N copies: ``length[i]`` bytes from address ``src[i]`` of the producer to ``dst[i]`` of the consumer."""

    src: Ints
    dst: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Blocks of one group to move: ``src_ids[i]`` of the producer to ``dst_ids[i]`` of the consumer."""

    group: int
    src_ids: Ints
    dst_ids: Ints


def build_runs(plan: PairPlan, moves: Sequence[BlockMoves]) -> Runs:
    """All runs of some blocks of some groups, adjacent ones merged."""
    parts = [_expand(plan.groups[move.group], move) for move in moves]
    if not parts:
        empty = np.empty(0, np.int64)
        return Runs(empty, empty, empty)
    return coalesce(Runs(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def _expand(plan: GroupPlan, move: BlockMoves) -> tuple[Ints, Ints, Ints]:
    """Every piece of every block, ordered by piece, then by block, so that neighbouring blocks can merge."""
    if move.src_ids.shape != move.dst_ids.shape:
        raise PlanError(f"group {move.group}: {len(move.src_ids)} source for {len(move.dst_ids)} destination blocks")
    src = plan.src_address[:, None] + plan.src_block_stride[:, None] * move.src_ids[None, :]
    dst = plan.dst_address[:, None] + plan.dst_block_stride[:, None] * move.dst_ids[None, :]
    length = np.broadcast_to(plan.piece_bytes[:, None], src.shape)
    return src.ravel(), dst.ravel(), length.ravel()


def coalesce(runs: Runs) -> Runs:
    """Merge each run with the one before it where both its source and its destination continue there."""
    if len(runs) < 2:
        return runs
    ends_src, ends_dst = runs.src[:-1] + runs.length[:-1], runs.dst[:-1] + runs.length[:-1]
    starts = np.concatenate(([True], (runs.src[1:] != ends_src) | (runs.dst[1:] != ends_dst)))
    heads = np.flatnonzero(starts)
    return Runs(runs.src[heads], runs.dst[heads], np.add.reduceat(runs.length, heads))
