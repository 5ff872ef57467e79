"""Builders of engine layouts over real numpy buffers, and an oracle independent of the planner.

Contents are given per global head, so that every rank with a head (replicas too) has the same
bytes. Views are strided numpy arrays of (block, head, row, byte), made from the style alone: they
are the oracle's description of a layout, ``LayerPages`` is the planner's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from connectors.planning.descriptors import Moves, Runs
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region, unique_regions

HOST = MemoryKind("DRAM", 0)
CANARY = 0xA5
STYLES = ("packed", "head_major", "token_major", "heads_outer", "gapped_rows")

GroupShape = tuple[GroupKind, int | None, int]
"""(kind, window tokens, layers)"""

GEMMA: tuple[GroupShape, ...] = (
    (GroupKind.SLIDING, 8, 2),
    (GroupKind.SLIDING, 8, 2),
    (GroupKind.FULL, None, 2),
)


@dataclass(frozen=True)
class Shape:
    """One engine's cache. A row is one token of one head; ``packed`` moves ``rows`` of them as
    one.
    """

    kv_heads: int = 4
    style: str = "head_major"
    rows: int = 4
    row_bytes: int = 16
    num_blocks: int = 12
    pad_bytes: int = 0
    shared: bool = True
    groups: tuple[GroupShape, ...] = GEMMA
    block_tokens: int = 4


@dataclass
class Rank:
    """One worker: its layout, its buffers, and a (block, head, row, byte) view per group and
    layer.
    """

    layout: EngineLayout
    heads: list[int]
    views: list[list[np.ndarray]]
    buffers: list[np.ndarray] = field(repr=False)


def heads_of(rank: int, tp_size: int, kv_heads: int) -> list[int]:
    """Return the heads of a rank by vLLM's rule: contiguous shares, or one head on several
    ranks.
    """
    if tp_size > kv_heads:
        return [rank * kv_heads // tp_size]
    return [head for head in range(kv_heads) if rank * kv_heads // tp_size <= head < (rank + 1) * kv_heads // tp_size]


def strides(shape: Shape, heads: int) -> tuple[int, int, int, int]:
    """Return (buffer bytes, block stride, head stride, row stride) of one layer's pages of one
    rank.
    """
    row, rows, blocks = shape.row_bytes, shape.rows, shape.num_blocks
    if shape.style == "token_major":
        block = heads * rows * row + shape.pad_bytes
        return blocks * block, block, row, heads * row
    if shape.style == "heads_outer":
        block = rows * row + shape.pad_bytes
        return heads * blocks * block, block, blocks * block, row
    step = row + 8 if shape.style == "gapped_rows" else row
    block = heads * rows * step + shape.pad_bytes
    return blocks * block, block, rows * step, step


def make_rank(
    shape: Shape, tp_rank: int, tp_size: int, fill: int = CANARY, memory: Sequence[np.ndarray] | None = None
) -> Rank:
    """Return one worker's cache, filled with ``fill``.

    Layer k of every group lies in buffer k if regions are shared. ``memory`` has the buffers, which
    may be longer than needed.
    """
    heads = heads_of(tp_rank, tp_size, shape.kv_heads)
    size, block_stride, head_stride, row_stride = strides(shape, len(heads))
    layers = max(count for _, _, count in shape.groups) if shape.shared else sum(count for _, _, count in shape.groups)
    buffers = [np.empty(size, np.uint8) for _ in range(layers)] if memory is None else list(memory[:layers])
    for buffer in buffers:
        assert buffer.nbytes >= size
        buffer[:] = fill
    groups, views, used = [], [], 0
    for index, (kind, window, count) in enumerate(shape.groups):
        own = buffers[:count] if shape.shared else buffers[used : used + count]
        used += count
        packed = shape.style == "packed"
        pages = tuple(
            LayerPages(
                layer=f"layers.{index}.{k}",
                address=buffer.ctypes.data,
                block_stride_bytes=block_stride,
                total_heads=shape.kv_heads,
                heads=len(heads),
                head_stride_bytes=head_stride,
                rows=1 if packed else shape.rows,
                row_stride_bytes=shape.rows * shape.row_bytes if packed else row_stride,
                row_bytes=shape.rows * shape.row_bytes if packed else shape.row_bytes,
                packing="packed" if packed else "rows",
            )
            for k, buffer in enumerate(own)
        )
        groups.append(Group(index, kind, shape.block_tokens, window, pages))
        views.append(
            [
                as_strided(
                    buffer,
                    (shape.num_blocks, len(heads), shape.rows, shape.row_bytes),
                    (block_stride, head_stride, row_stride, 1),
                )
                for buffer in own
            ]
        )
    regions = unique_regions(Region(buffer.ctypes.data, buffer.nbytes, HOST) for buffer in buffers)
    layout = EngineLayout(tp_rank, tp_size, shape.num_blocks, regions, tuple(groups))
    return Rank(layout, heads, views, buffers)


def make_engine(shape: Shape, tp_size: int, fill: int = CANARY) -> list[Rank]:
    return [make_rank(shape, rank, tp_size, fill) for rank in range(tp_size)]


def fill_distinct(engine: Sequence[Rank], shape: Shape) -> None:
    """Return content whose 8-byte words are unique in the engine; replicas are equal."""
    assert shape.row_bytes % 8 == 0
    regions = len(engine[0].buffers)
    words = regions * shape.num_blocks * shape.kv_heads * shape.rows * (shape.row_bytes // 8)
    content = np.arange(1, words + 1, dtype="<u8").view(np.uint8)
    content = content.reshape(regions, shape.num_blocks, shape.kv_heads, shape.rows, shape.row_bytes)
    for rank in engine:
        region_of = {buffer.ctypes.data: k for k, buffer in enumerate(rank.buffers)}
        for group, views in zip(rank.layout.groups, rank.views, strict=True):
            for pages, view in zip(group.layers, views, strict=True):
                view[...] = content[region_of[pages.address]][:, rank.heads]


def execute(runs: Runs) -> None:
    for dst, src, length in zip(runs.dst.tolist(), runs.src.tolist(), runs.length.tolist(), strict=True):
        ctypes.memmove(dst, src, length)


def whole_blocks(group: int, src_ids: np.ndarray, dst_ids: np.ndarray) -> Moves:
    """Return units for blocks that are one unit on both sides."""
    return Moves(group, src_ids, np.zeros_like(src_ids), dst_ids, np.zeros_like(dst_ids))


def draw_moves(rng: np.random.Generator, producer: Shape, consumer: Shape) -> list[Moves]:
    """Return fragmented block ids: disjoint between groups, as from one pool, without the null
    block.
    """
    most = (min(producer.num_blocks, consumer.num_blocks) - 1) // len(producer.groups)
    src = rng.permutation(np.arange(1, producer.num_blocks))
    dst = rng.permutation(np.arange(1, consumer.num_blocks))
    moves, at = [], 0
    for group in range(len(producer.groups)):
        count = int(rng.integers(0, most + 1))
        moves.append(whole_blocks(group, src[at : at + count].copy(), dst[at : at + count].copy()))
        at += count
    return moves


def with_field(layout: EngineLayout, group: int, **changes: Any) -> EngineLayout:
    """Return a layout with another group."""
    groups = list(layout.groups)
    groups[group] = replace(groups[group], **changes)
    return replace(layout, groups=tuple(groups))
