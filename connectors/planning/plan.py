"""(producer layout, consumer layout) -> the strided pieces that each block of each group is moved in.

A plan is made once for a pair of ranks. Everything that geometry has to say about one block of one group is four
numbers a piece: where it starts at the source and the destination, and how far the next block is. Applying it to
block ids is a broadcast (``descriptors.py``), whatever the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from connectors.errors import IncompatiblePeerError, PlanError
from connectors.planning.blocks import Ints
from connectors.planning.heads import HeadShare, head_shares, held_heads
from connectors.planning.layout import EngineLayout, Group, LayerPages


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The K pieces of one block of one group, as vectors of length K: addresses for block id 0, strides, bytes."""

    src_address: Ints
    src_block_stride: Ints
    dst_address: Ints
    dst_block_stride: Ints
    piece_bytes: Ints

    @property
    def block_bytes(self) -> int:
        """Bytes that this pair of ranks moves for one block id."""
        return int(self.piece_bytes.sum())


@dataclass(frozen=True, slots=True)
class PairPlan:
    """All that producer rank ``producer_rank`` sends to consumer rank ``consumer_rank``, by group."""

    producer_rank: int
    consumer_rank: int
    groups: tuple[GroupPlan, ...]

    def transfer_bytes(self, block_counts: tuple[int, ...]) -> int:
        """Bytes of a whole transfer that wants ``block_counts[g]`` blocks of group g."""
        if len(block_counts) != len(self.groups):
            raise PlanError(f"{len(block_counts)} block counts for {len(self.groups)} groups")
        return sum(count * plan.block_bytes for count, plan in zip(block_counts, self.groups, strict=True))


def check_compatible(producer: EngineLayout, consumer: EngineLayout) -> None:
    """Raise IncompatiblePeerError, naming the first thing that differs, where no plan can exist."""
    same_model = "start both engines with the same model and dtype"
    same_blocks = "give both engines the same block_size"
    if producer.kv_heads != consumer.kv_heads:
        raise IncompatiblePeerError("number of KV heads", consumer.kv_heads, producer.kv_heads, same_model)
    if len(producer.groups) != len(consumer.groups):
        ours, theirs = len(consumer.groups), len(producer.groups)
        raise IncompatiblePeerError("number of KV cache groups", ours, theirs, same_model)
    for theirs_group, ours_group in zip(producer.groups, consumer.groups, strict=True):
        where = f"of KV cache group {ours_group.index}"
        for field, remedy in (
            ("kind", same_model),
            ("window_tokens", same_model),
            ("block_tokens", same_blocks),
        ):
            ours_value, theirs_value = getattr(ours_group, field), getattr(theirs_group, field)
            if ours_value != theirs_value:
                raise IncompatiblePeerError(f"{field} {where}", ours_value, theirs_value, remedy)
        ours_names = tuple(pages.layer for pages in ours_group.layers)
        theirs_names = tuple(pages.layer for pages in theirs_group.layers)
        if ours_names != theirs_names:
            raise IncompatiblePeerError(f"layers {where}", ours_names, theirs_names, same_model)
        for theirs_pages, ours_pages in zip(theirs_group.layers, ours_group.layers, strict=True):
            for field in ("packing", "rows", "row_bytes"):
                ours_value, theirs_value = getattr(ours_pages, field), getattr(theirs_pages, field)
                if ours_value != theirs_value:
                    raise IncompatiblePeerError(
                        f"{field} of layer {ours_pages.layer!r}",
                        ours_value,
                        theirs_value,
                        f"{same_model} and KV layout",
                    )


def plan_pair(producer: EngineLayout, consumer: EngineLayout) -> PairPlan:
    """Plan what one producer rank sends to one consumer rank. Layouts must be compatible (``check_compatible``).

    A pair without a share gets a plan without pieces: it exchanges messages and no bytes.
    """
    shares = [
        share
        for share in head_shares(producer.tp_size, consumer.tp_size, consumer.kv_heads)
        if (share.producer_rank, share.consumer_rank) == (producer.tp_rank, consumer.tp_rank)
    ]
    src_first = held_heads(producer.tp_rank, producer.tp_size, producer.kv_heads).start
    dst_first = held_heads(consumer.tp_rank, consumer.tp_size, consumer.kv_heads).start
    groups = tuple(
        _plan_group(src, dst, shares, src_first, dst_first)
        for src, dst in zip(producer.groups, consumer.groups, strict=True)
    )
    return PairPlan(producer.tp_rank, consumer.tp_rank, groups)


def _plan_group(src: Group, dst: Group, shares: list[HeadShare], src_first: int, dst_first: int) -> GroupPlan:
    pieces: list[tuple[int, int, int, int, int]] = []
    for src_pages, dst_pages in zip(src.layers, dst.layers, strict=True):
        for share in shares:
            for src_offset, dst_offset, length in _pieces(
                src_pages,
                share.first - src_first,
                dst_pages,
                share.first - dst_first,
                share.stop - share.first,
            ):
                pieces.append(
                    (
                        src_pages.address + src_offset,
                        src_pages.block_stride_bytes,
                        dst_pages.address + dst_offset,
                        dst_pages.block_stride_bytes,
                        length,
                    )
                )
    columns = np.asarray(pieces, np.int64).reshape(-1, 5).T
    return GroupPlan(*(np.ascontiguousarray(column) for column in columns))


def _pieces(src: LayerPages, src_head: int, dst: LayerPages, dst_head: int, heads: int) -> list[tuple[int, int, int]]:
    """(source offset, destination offset, bytes) of ``heads`` heads of one page, as few as both sides allow.

    ``src_head`` and ``dst_head`` count from the first head that each rank holds.
    """
    if src_head + heads > src.heads or dst_head + heads > dst.heads:
        raise PlanError(f"layer {src.layer!r}: a share of {heads} heads reaches past the heads that are held")
    rows_dense = all(p.rows == 1 or p.row_stride_bytes == p.row_bytes for p in (src, dst))
    heads_dense = all(p.head_stride_bytes == p.head_bytes for p in (src, dst))
    src_base, dst_base = src_head * src.head_stride_bytes, dst_head * dst.head_stride_bytes
    if heads == 1 and rows_dense:
        return [(src_base, dst_base, src.head_bytes)]
    if rows_dense and heads_dense:
        return [(src_base, dst_base, heads * src.head_bytes)]
    if rows_dense:
        return [
            (src_base + h * src.head_stride_bytes, dst_base + h * dst.head_stride_bytes, src.head_bytes)
            for h in range(heads)
        ]
    heads_adjacent = all(p.head_stride_bytes == p.row_bytes for p in (src, dst))
    head_steps, length = (1, heads * src.row_bytes) if heads_adjacent else (heads, src.row_bytes)
    return [
        (
            src_base + h * src.head_stride_bytes + r * src.row_stride_bytes,
            dst_base + h * dst.head_stride_bytes + r * dst.row_stride_bytes,
            length,
        )
        for r in range(src.rows)
        for h in range(head_steps)
    ]
