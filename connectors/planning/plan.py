"""(producer layout, consumer layout) -> the strided pieces that each unit of each group is moved in.

A plan is made once for a pair of ranks. Everything that geometry has to say about one unit of one group is a few
numbers a piece: where it starts at the source and the destination, how far the next block is, and where the units of
a block lie in it. Applying it to block ids is a broadcast (``descriptors.py``), whatever the model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from connectors.errors import IncompatiblePeerError, PlanError
from connectors.planning.blocks import Ints, UnitShape
from connectors.planning.heads import HeadShare, head_shares, held_heads
from connectors.planning.layout import WINDOWED, EngineLayout, Group, GroupKind, LayerPages, numbered


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a group's K pieces: address for block id 0, bytes to the next block, and where unit j of a block lies.

    Shapes: ``address`` and ``block_stride`` (K,), ``unit_offset`` (K, units a block).
    """

    address: Ints
    block_stride: Ints
    unit_offset: Ints

    def at(self, pieces: slice, ids: Ints, parts: Ints) -> Ints:
        """Address of every piece of every unit, shape (pieces, units)."""
        blocks = self.address[pieces, None] + self.block_stride[pieces, None] * ids[None, :]
        if self.unit_offset.shape[1] == 1:
            return blocks
        return blocks + self.unit_offset[pieces][:, parts]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The K pieces of one unit of one group, in the order of its layers; ``layer_of[k]`` counts layers in the group."""

    shape: UnitShape
    src: Side
    dst: Side
    piece_bytes: Ints
    layer_of: Ints

    @property
    def unit_bytes(self) -> int:
        """Bytes that this pair of ranks moves for one unit."""
        return int(self.piece_bytes.sum())

    def pieces_of(self, layers: tuple[int, int] | None) -> slice:
        """The pieces of layers ``[first, stop)`` of the group; None means all."""
        if layers is None:
            return slice(0, len(self.piece_bytes))
        first, stop = np.searchsorted(self.layer_of, layers)
        return slice(int(first), int(stop))


@dataclass(frozen=True, slots=True)
class PairPlan:
    """All that producer rank ``producer_rank`` sends to consumer rank ``consumer_rank``, by group."""

    producer_rank: int
    consumer_rank: int
    groups: tuple[GroupPlan, ...]

    @property
    def shapes(self) -> tuple[UnitShape, ...]:
        return tuple(plan.shape for plan in self.groups)

    @property
    def unit_bytes(self) -> tuple[int, ...]:
        return tuple(plan.unit_bytes for plan in self.groups)


def check_compatible(producer: EngineLayout, consumer: EngineLayout) -> None:
    """Raise IncompatiblePeerError, naming the first thing that differs, where no plan can exist."""
    same_model = "start both engines with the same model and dtype"
    if len(producer.groups) != len(consumer.groups):
        ours, theirs = len(consumer.groups), len(producer.groups)
        raise IncompatiblePeerError("number of KV cache groups", ours, theirs, same_model)
    for theirs_group, ours_group in zip(producer.groups, consumer.groups, strict=True):
        where = f"of KV cache group {ours_group.index}"
        _same(f"kind {where}", ours_group.kind, theirs_group.kind, same_model)
        _same(f"window_tokens {where}", ours_group.window_tokens, theirs_group.window_tokens, same_model)
        _check_window(producer, consumer, ours_group.index)
        ours_names, theirs_names = (tuple(p.layer for p in g.layers) for g in (ours_group, theirs_group))
        _same(f"layers {where}", ours_names, theirs_names, same_model)
        for theirs_pages, ours_pages in zip(theirs_group.layers, ours_group.layers, strict=True):
            _check_pages(theirs_group, theirs_pages, ours_group, ours_pages)


def _check_window(producer: EngineLayout, consumer: EngineLayout, index: int) -> None:
    """A producer whose blocks do not hold whole blocks of the consumer's may fill one of them in part only.

    That is harmless unless somebody takes the rest for filled: a prefix cache, where a window begins within the block;
    or, where states share the pool, attention behind the prompt's end: vLLM leaves it to us to clear such blocks.
    """
    theirs, ours = producer.groups[index], consumer.groups[index]
    if ours.kind is GroupKind.STATE or not theirs.block_tokens % ours.block_tokens:
        return
    if any(group.kind is GroupKind.STATE for group in consumer.groups):
        raise IncompatiblePeerError(
            f"block_tokens of KV cache group {index}",
            ours.block_tokens,
            theirs.block_tokens,
            "beside state groups, give prefill a block_size that is a multiple of decode's",
        )
    if consumer.caches_prefixes and ours.kind in WINDOWED:
        raise IncompatiblePeerError(
            f"block_tokens of KV cache group {index}",
            ours.block_tokens,
            theirs.block_tokens,
            "a window would leave a block of decode's filled in part, which its prefix cache takes for whole: turn "
            "decode's enable_prefix_caching off, or give prefill a block_size that is a multiple of decode's",
        )


def _check_pages(theirs_group: Group, theirs: LayerPages, ours_group: Group, ours: LayerPages) -> None:
    same_layout = "start both engines with the same model, dtype and KV layout"
    of = f"of layer {ours.layer!r}"
    # First, because it names what cannot be split over other ranks or blocks.
    _same(f"packing {of}", ours.packing, theirs.packing, same_layout)
    _same(f"number of KV heads {of}", ours.total_heads, theirs.total_heads, same_layout)
    _same(f"stripes {of}", ours.stripes, theirs.stripes, same_layout)
    if ours_group.kind is GroupKind.STATE:
        for field in ("rows", "row_bytes"):
            _same(f"{field} {of}", getattr(ours, field), getattr(theirs, field), same_layout)
        return
    sizes = f"the block sizes are {ours_group.block_tokens} and {theirs_group.block_tokens} tokens; "
    ours_row, theirs_row = ours_group.row_tokens(ours), theirs_group.row_tokens(theirs)
    _same(f"tokens in what cannot be cut {of}", ours_row, theirs_row, f"{sizes}give both engines the same block_size")
    _same(f"row_bytes {of}", ours.row_bytes, theirs.row_bytes, same_layout)


def _same(field: str, ours: object, theirs: object, remedy: str) -> None:
    if ours != theirs:
        raise IncompatiblePeerError(field, ours, theirs, remedy)


def unit_shape(src: Group, dst: Group) -> UnitShape:
    """The largest unit that lies in one block, and in one kernel block, on both sides."""
    if src.kind is GroupKind.STATE:
        return UnitShape(1, 1, 1)
    blocks = [group.block_tokens // pages.kernel_blocks for group in (src, dst) for pages in group.layers]
    tokens = math.gcd(src.block_tokens, dst.block_tokens, *blocks)
    for group in (src, dst):
        for pages in group.layers:
            if tokens % group.row_tokens(pages):
                raise PlanError(
                    f"layer {pages.layer!r}: blocks of {src.block_tokens} and {dst.block_tokens} tokens have "
                    f"{tokens} in common, and {group.row_tokens(pages)} tokens are packed together"
                )
    return UnitShape(tokens, src.block_tokens // tokens, dst.block_tokens // tokens)


def plan_pair(producer: EngineLayout, consumer: EngineLayout) -> PairPlan:
    """Plan what one producer rank sends to one consumer rank. Layouts must be compatible (``check_compatible``).

    A pair without a share gets a plan without pieces: it exchanges messages and no bytes.
    """

    def shares(layer_index: int, heads: int) -> list[HeadShare]:
        every = head_shares(producer.tp_size, consumer.tp_size, heads, layer_index)
        return [s for s in every if (s.producer_rank, s.consumer_rank) == (producer.tp_rank, consumer.tp_rank)]

    groups = tuple(
        _plan_group(_Ends(src, producer), _Ends(dst, consumer), numbered(src, producer.groups), shares)
        for src, dst in zip(producer.groups, consumer.groups, strict=True)
    )
    return PairPlan(producer.tp_rank, consumer.tp_rank, groups)


@dataclass(frozen=True, slots=True)
class _Ends:
    """One side's group, on the rank that holds it."""

    group: Group
    engine: EngineLayout

    def first_head(self, pages: LayerPages) -> int:
        return held_heads(self.engine.tp_rank, self.engine.tp_size, pages.total_heads).start


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stretch of one unit that is contiguous on both sides, as offsets from the pages' addresses."""

    src: int
    dst: int
    length: int


_Column = tuple[int, LayerPages, LayerPages, _Piece]


def _plan_group(
    src: _Ends, dst: _Ends, numbered_pages: list[tuple[int, LayerPages]], shares: Callable[[int, int], list[HeadShare]]
) -> GroupPlan:
    shape = unit_shape(src.group, dst.group)
    columns: list[_Column] = []
    for (layer_index, src_pages), dst_pages in zip(numbered_pages, dst.group.layers, strict=True):
        rows = src_pages.rows
        if src.group.kind is not GroupKind.STATE:
            rows = shape.tokens // src.group.row_tokens(src_pages)
        for share in shares(layer_index, src_pages.total_heads):
            first = (share.first - src.first_head(src_pages), share.first - dst.first_head(dst_pages))
            pieces = _pieces(src_pages, dst_pages, first, share.stop - share.first, rows)
            columns += [(layer_index, src_pages, dst_pages, piece) for piece in pieces]
    if (shape.src_units, shape.dst_units) == (1, 1):
        columns = _merge_columns(columns)
    first_layer = numbered_pages[0][0] if numbered_pages else 0
    return GroupPlan(
        shape,
        _side(src.group, shape, shape.src_units, [(pages, piece.src) for _, pages, _, piece in columns]),
        _side(dst.group, shape, shape.dst_units, [(pages, piece.dst) for _, _, pages, piece in columns]),
        np.asarray([piece.length for *_, piece in columns], np.int64),
        np.asarray([layer_index - first_layer for layer_index, *_ in columns], np.int64),
    )


def _side(group: Group, shape: UnitShape, units: int, pieces: list[tuple[LayerPages, int]]) -> Side:
    offsets = np.zeros((len(pieces), units), np.int64)
    for row, (pages, _) in enumerate(pieces):
        if units > 1:
            kernel_tokens = group.block_tokens // pages.kernel_blocks
            token = np.arange(units, dtype=np.int64) * shape.tokens
            offsets[row] = token // kernel_tokens * pages.kernel_block_stride_bytes
            offsets[row] += token % kernel_tokens // group.row_tokens(pages) * pages.row_stride_bytes
    address = [pages.address + offset for pages, offset in pieces]
    stride = [pages.block_stride_bytes for pages, _ in pieces]
    return Side(np.asarray(address, np.int64), np.asarray(stride, np.int64), offsets)


def _merge_columns(columns: list[_Column]) -> list[_Column]:
    """Join pieces that continue each other in every block: K and V of a head, a state's parts."""
    merged: list[_Column] = []
    order = sorted(columns, key=lambda c: (c[0], c[1].address + c[3].src))
    for layer_index, src, dst, piece in order:
        if merged:
            last_layer, last_src, last_dst, last = merged[-1]
            continues = (
                last_layer == layer_index
                and last_src.address + last.src + last.length == src.address + piece.src
                and last_dst.address + last.dst + last.length == dst.address + piece.dst
                and last_src.block_stride_bytes == src.block_stride_bytes
                and last_dst.block_stride_bytes == dst.block_stride_bytes
            )
            if continues:
                merged[-1] = (layer_index, last_src, last_dst, _Piece(last.src, last.dst, last.length + piece.length))
                continue
        merged.append((layer_index, src, dst, piece))
    return merged


def _pieces(src: LayerPages, dst: LayerPages, first: tuple[int, int], heads: int, rows: int) -> list[_Piece]:
    """``heads`` heads of ``rows`` rows, in as few pieces as both sides allow.

    ``first`` are their numbers among the heads that the source's and the destination's rank hold.
    """
    src_head, dst_head = first
    if src_head + heads > src.heads or dst_head + heads > dst.heads:
        raise PlanError(f"layer {src.layer!r}: a share of {heads} heads reaches past the heads that are held")
    steps = [
        (heads, src.head_stride_bytes, dst.head_stride_bytes),
        (src.stripes, src.stripe_stride_bytes, dst.stripe_stride_bytes),
        (rows, src.row_stride_bytes, dst.row_stride_bytes),
    ]
    left = sorted((step for step in steps if step[0] > 1), key=lambda step: step[1])
    length = src.row_bytes
    while left and left[0][1] == left[0][2] == length:
        length *= left.pop(0)[0]
    src_base, dst_base = src_head * src.head_stride_bytes, dst_head * dst.head_stride_bytes
    return [
        _Piece(
            src_base + sum(at * step[1] for at, step in zip(position, left, strict=True)),
            dst_base + sum(at * step[2] for at, step in zip(position, left, strict=True)),
            length,
        )
        for position in itertools.product(*(range(step[0]) for step in left))
    ]
