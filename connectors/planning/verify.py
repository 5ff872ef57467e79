"""Prove that plans write each requested byte of a consumer rank once, and no other byte.

For copies into the KV store, the consumer is the virtual engine of ``store/planning/layout.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from connectors.errors import CoverError
from connectors.planning.blocks import Ints
from connectors.planning.descriptors import Moves, Runs, build_runs
from connectors.planning.layout import EngineLayout
from connectors.planning.plan import PairPlan


def wanted_bytes(consumer: EngineLayout, block_ids: Sequence[Ints]) -> tuple[Ints, Ints]:
    """Return (addresses, lengths) of all rows of the blocks of each group, sorted and merged."""
    addresses: list[Ints] = []
    lengths: list[Ints] = []
    for group, ids in zip(consumer.groups, block_ids, strict=True):
        for pages in group.layers:
            axes = (
                (pages.kernel_blocks, pages.kernel_block_stride_bytes),
                (pages.heads, pages.head_stride_bytes),
                (pages.stripes, pages.stripe_stride_bytes),
                (pages.rows, pages.row_stride_bytes),
            )
            grid = pages.address + ids * pages.block_stride_bytes
            for count, stride in axes:
                grid = np.add.outer(grid, np.arange(count, dtype=np.int64) * stride).ravel()
            addresses.append(grid)
            lengths.append(np.full(grid.shape, pages.row_bytes, np.int64))
    return _merged(np.concatenate(addresses), np.concatenate(lengths), "wanted")


def verify_cover(consumer: EngineLayout, block_ids: Sequence[Ints], runs: Sequence[Runs]) -> None:
    """Raise CoverError unless the runs write each byte of the given blocks once, and no other byte.

    ``block_ids`` has one entry per group, ``runs`` one per producer rank.
    """
    want_address, want_length = wanted_bytes(consumer, block_ids)
    if runs and sum(len(part) for part in runs):
        dst = np.concatenate([part.dst for part in runs])
        length = np.concatenate([part.length for part in runs])
        got_address, got_length = _merged(dst, length, "written")
    else:
        got_address = got_length = np.empty(0, np.int64)
    if not (np.array_equal(want_address, got_address) and np.array_equal(want_length, got_length)):
        missing, extra = int(want_length.sum()), int(got_length.sum())
        raise CoverError(f"the plans write {extra} bytes, but not exactly the {missing} bytes that the blocks need")


def prove_plans(consumer: EngineLayout, plans: Sequence[PairPlan]) -> None:
    """Prove the plans of one consumer rank, one per producer rank, on one block of each group.

    One block is enough: pieces are the same for every block, and pages of blocks in use at the same
    time do not overlap. Groups are proved separately because they may share memory. Raises
    CoverError.
    """
    for group in consumer.groups:
        ids = [np.empty(0, np.int64) for _ in consumer.groups]
        ids[group.index] = np.asarray([min(1, consumer.num_blocks - 1)], np.int64)
        verify_cover(consumer, ids, [_block_runs(plan, group.index, ids[group.index]) for plan in plans])


def _block_runs(plan: PairPlan, group: int, block_id: Ints) -> Runs:
    """Return a plan's runs into a block of a group, which is also the (unused) source."""
    shape = plan.groups[group].shape
    units = np.arange(shape.dst_units, dtype=np.int64)
    block = np.repeat(block_id, len(units))
    return build_runs(plan, [Moves(group, block, units % shape.src_units, block, units)])


def _merged(address: Ints, length: Ints, what: str) -> tuple[Ints, Ints]:
    """Sort the byte ranges and merge adjacent ones. Raises CoverError if two overlap."""
    if not len(address):
        return address, length
    order = np.argsort(address, kind="stable")
    address, length = address[order], length[order]
    ends = address + length
    if (address[1:] < ends[:-1]).any():
        first = int(np.flatnonzero(address[1:] < ends[:-1])[0])
        raise CoverError(f"bytes at address {int(address[first + 1]):#x} are {what} more than once")
    starts = np.flatnonzero(np.concatenate(([True], address[1:] != ends[:-1])))
    return address[starts], np.add.reduceat(length, starts)
