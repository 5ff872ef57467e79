"""Apply plans to block ids: return the contiguous byte ranges to copy (*runs*) as numpy vectors.

No Python object is created per block: 10,000 blocks take a few numpy operations. For the KV store,
objects in this process's memory are the consumer when KV of a rank is stored, and the producer when
KV is loaded (``store/planning/layout.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from connectors.errors import PlanError
from connectors.planning.blocks import Ints
from connectors.planning.plan import GroupPlan, PairPlan, Pieces


@dataclass(frozen=True, slots=True)
class Runs:
    """N contiguous byte ranges to copy: source and destination addresses, and bytes, each of shape
    (N,).
    """

    src: Ints
    dst: Ints
    length: Ints

    def __len__(self) -> int:
        return len(self.length)

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())

    def slices(self, max_runs: int, max_bytes: int) -> Iterator[Runs]:
        """Yield parts of at most ``max_runs``; one of several runs has at most ``max_bytes``."""
        ends, first = np.cumsum(self.length), 0
        while first < len(self):
            within = np.searchsorted(ends, ends[first] - self.length[first] + max_bytes, "right")
            part = slice(first, min(first + max_runs, max(first + 1, int(within))))
            yield Runs(self.src[part], self.dst[part], self.length[part])
            first = part.stop


@dataclass(frozen=True, slots=True)
class Moves:
    """Units of one group to copy; four vectors of shape (N,): blocks, and each unit's index within
    them.

    ``layers``  ``(first, stop)`` range of the producer rank's layers of the group, as in
                ``GroupPlan.layer_of``; ``stop`` may exceed their number. None means all layers
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
    """Return the runs of all moves, merged. Raises PlanError for unequal numbers of units."""
    parts = [_expand(plan.groups[move.group], move) for move in moves]
    if not parts:
        empty = np.empty(0, np.int64)
        return Runs(empty, empty, empty)
    if len(parts) == 1:
        return coalesce(Runs(*parts[0]))
    return coalesce(Runs(*(np.concatenate(column) for column in zip(*parts, strict=True))))


def move_bytes(plan: PairPlan, move: Moves) -> int:
    group = plan.groups[move.group]
    return len(move) * int(group.piece_bytes[group.pieces_of(move.layers)].sum())


def _expand(plan: GroupPlan, move: Moves) -> tuple[Ints, Ints, Ints]:
    """Return (source addresses, destination addresses, lengths) of the runs of a move.

    In order of pieces, then units: runs of neighbouring units are adjacent and can merge.
    """
    if move.src_ids.shape != move.dst_ids.shape:
        raise PlanError(
            f"group {move.group}: {len(move.src_ids)} source units for {len(move.dst_ids)} destination units"
        )
    pieces = plan.across_layers(move.layers)
    firsts, counts = _contiguous_units(pieces, move)
    src = pieces.src.at(move.src_ids[firsts], move.src_parts[firsts])
    dst = pieces.dst.at(move.dst_ids[firsts], move.dst_parts[firsts])
    length = pieces.piece_bytes[:, None] * counts[None, :]
    return src.ravel(), dst.ravel(), length.ravel()


def _contiguous_units(pieces: Pieces, move: Moves) -> tuple[Ints, Ints]:
    """Return (index of the first unit, number of units) of each contiguous range of units.

    If units are whole blocks and pages are dense on both sides, units with consecutive block ids on
    both sides are one range.
    """
    size = pieces.piece_bytes
    dense = (pieces.src.block_stride == size).all() and (pieces.dst.block_stride == size).all()
    if len(move) < 2 or not (pieces.whole_blocks and dense):
        return np.arange(len(move)), np.ones(len(move), np.int64)
    breaks = (np.diff(move.src_ids) != 1) | (np.diff(move.dst_ids) != 1)
    firsts = np.flatnonzero(np.concatenate(([True], breaks)))
    return firsts, np.diff(firsts, append=len(move))


def coalesce(runs: Runs) -> Runs:
    """Merge consecutive runs that are adjacent in both source and destination memory."""
    if len(runs) < 2:
        return runs
    ends_src, ends_dst = runs.src[:-1] + runs.length[:-1], runs.dst[:-1] + runs.length[:-1]
    breaks = (runs.src[1:] != ends_src) | (runs.dst[1:] != ends_dst)
    if breaks.all():
        return runs
    firsts = np.flatnonzero(np.concatenate(([True], breaks)))
    return Runs(runs.src[firsts], runs.dst[firsts], np.add.reduceat(runs.length, firsts))
