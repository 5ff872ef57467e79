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
class Moves:
    """Units of one group to move: part ``src_parts[i]`` of the producer's block ``src_ids[i]`` to the consumer's.

    ``layers`` limits the move to layers ``[first, stop)`` of the group.
    """

    group: int
    src_ids: Ints
    src_parts: Ints
    dst_ids: Ints
    dst_parts: Ints
    layers: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.dst_ids)


def build_runs(plan: PairPlan, moves: Sequence[Moves]) -> Runs:
    """All runs of some units of some groups, adjacent ones merged."""
    parts = [_expand(plan.groups[move.group], move) for move in moves]
    if not parts:
        empty = np.empty(0, np.int64)
        return Runs(empty, empty, empty)
    if len(parts) == 1:
        return coalesce(Runs(*parts[0]))
    return coalesce(Runs(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def move_bytes(plan: PairPlan, move: Moves) -> int:
    """Return the number of bytes of a move."""
    group = plan.groups[move.group]
    return len(move) * int(group.piece_bytes[group.pieces_of(move.layers)].sum())


def _expand(plan: GroupPlan, move: Moves) -> tuple[Ints, Ints, Ints]:
    """Every piece of every unit, ordered by piece, then by unit, so that neighbouring units can merge."""
    if move.src_ids.shape != move.dst_ids.shape:
        raise PlanError(f"group {move.group}: {len(move.src_ids)} source for {len(move.dst_ids)} destination units")
    pieces = plan.pieces_of(move.layers)
    heads, counts = _stretches(plan, pieces, move)
    src = plan.src.at(pieces, move.src_ids[heads], move.src_parts[heads])
    dst = plan.dst.at(pieces, move.dst_ids[heads], move.dst_parts[heads])
    length = plan.piece_bytes[pieces, None] * counts[None, :]
    return src.ravel(), dst.ravel(), length.ravel()


def _stretches(plan: GroupPlan, pieces: slice, move: Moves) -> tuple[Ints, Ints]:
    """(first unit, number of units) of the stretches whose units continue each other in every piece.

    Where pages follow each other without a gap on both sides, that is decided by the ids alone, once for all pieces.
    """
    size = plan.piece_bytes[pieces]
    whole = plan.src.unit_offset.shape[1] == plan.dst.unit_offset.shape[1] == 1
    dense = (plan.src.block_stride[pieces] == size).all() and (plan.dst.block_stride[pieces] == size).all()
    if len(move) < 2 or not (whole and dense):
        return np.arange(len(move)), np.ones(len(move), np.int64)
    breaks = (np.diff(move.src_ids) != 1) | (np.diff(move.dst_ids) != 1)
    heads = np.flatnonzero(np.concatenate(([True], breaks)))
    return heads, np.diff(heads, append=len(move))


def coalesce(runs: Runs) -> Runs:
    """Merge each run with the one before it where both its source and its destination continue there."""
    if len(runs) < 2:
        return runs
    ends_src, ends_dst = runs.src[:-1] + runs.length[:-1], runs.dst[:-1] + runs.length[:-1]
    breaks = (runs.src[1:] != ends_src) | (runs.dst[1:] != ends_dst)
    if breaks.all():
        return runs
    heads = np.flatnonzero(np.concatenate(([True], breaks)))
    return Runs(runs.src[heads], runs.dst[heads], np.add.reduceat(runs.length, heads))
