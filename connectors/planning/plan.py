"""Plan the copies between two cache layouts: the contiguous pieces of each unit of each group.

The connector plans a pair of ranks in their handshake, and a rank's copies to and from the KV store
when the engine starts. A *piece* is a byte range of a unit that is contiguous on both sides.
Applying a plan to block ids takes a few numpy operations per group and side (``descriptors.py``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from connectors.errors import IncompatiblePeerError, PlanError
from connectors.planning.blocks import Ints, UnitShape
from connectors.planning.heads import HeadShare, head_shares, held_heads
from connectors.planning.layout import WINDOWED, EngineLayout, Group, GroupKind, LayerPages, model_layer_count, numbered


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a group's K pieces.

    ``address``       address of each piece in block 0, shape (K,)
    ``block_stride``  bytes from one block to the next, shape (K,)
    ``unit_offset``   bytes from a piece of a block's first unit to the same piece of its unit j,
                      shape (K, units per block)
    """

    address: Ints
    block_stride: Ints
    unit_offset: Ints

    def at(self, ids: Ints, parts: Ints) -> Ints:
        """Return the address of every piece of every unit, shape (K, units)."""
        blocks = self.address[:, None] + self.block_stride[:, None] * ids[None, :]
        if self.unit_offset.shape[1] == 1:
            return blocks
        return blocks + self.unit_offset[:, parts]

    def of(self, pieces: slice | Ints) -> Side:
        return Side(self.address[pieces], self.block_stride[pieces], self.unit_offset[pieces])


@dataclass(frozen=True, slots=True)
class Pieces:
    """K pieces of a unit: where they lie on both sides, and the bytes of each, shape (K,)."""

    src: Side
    dst: Side
    piece_bytes: Ints

    @property
    def whole_blocks(self) -> bool:
        """True if a unit is a whole block on both sides."""
        return bool(self.src.unit_offset.shape[1] == self.dst.unit_offset.shape[1] == 1)

    def joined(self, keys: Ints) -> tuple[Pieces, Ints]:
        """Sort by key and source address, and join; unchanged unless ``whole_blocks``.

        Pieces with equal ``keys``, shape (K,), that are adjacent in every block on both sides
        become one. Return the pieces and their keys.
        """
        if not self.whole_blocks or not len(keys):
            return self, keys
        order = np.lexsort((self.src.address, keys))
        src, dst, size, keys = self.src.of(order), self.dst.of(order), self.piece_bytes[order], keys[order]
        breaks = np.diff(keys) != 0
        for side in (src, dst):
            breaks |= np.diff(side.address) != size[:-1]
            breaks |= np.diff(side.block_stride) != 0
        firsts = np.flatnonzero(np.concatenate(([True], breaks)))
        return Pieces(src.of(firsts), dst.of(firsts), np.add.reduceat(size, firsts)), keys[firsts]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """The K pieces of one unit of one group that one rank sends to another, sorted by layer.

    ``layer_of``  index of each piece's layer among the group's layers, shape (K,)
    """

    shape: UnitShape
    src: Side
    dst: Side
    piece_bytes: Ints
    layer_of: Ints
    _across_layers: dict[tuple[int, int] | None, Pieces] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def unit_bytes(self) -> int:
        return int(self.piece_bytes.sum())

    def pieces_of(self, layers: tuple[int, int] | None) -> slice:
        """Return the slice of the pieces of layers ``[first, stop)``; None means all layers."""
        if layers is None:
            return slice(0, len(self.piece_bytes))
        first, stop = np.searchsorted(self.layer_of, layers)
        return slice(int(first), int(stop))

    def across_layers(self, layers: tuple[int, int] | None) -> Pieces:
        """Return the pieces of these layers, joined where layers of a block are adjacent."""
        found = self._across_layers.get(layers)
        if found is None:
            chosen = self.pieces_of(layers)
            pieces = Pieces(self.src.of(chosen), self.dst.of(chosen), self.piece_bytes[chosen])
            found, _ = pieces.joined(np.zeros_like(pieces.piece_bytes))
            self._across_layers[layers] = found
        return found


@dataclass(frozen=True, slots=True)
class PairPlan:
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
    """Raise IncompatiblePeerError with the first difference that prevents a correct transfer.

    ``plan_pair`` can still raise PlanError, for block sizes without a common unit of whole rows.
    """
    for (name, ours, remedy), (_, theirs, _) in zip(compared(consumer), compared(producer), strict=True):
        if ours != theirs:
            raise IncompatiblePeerError(name, ours, theirs, remedy)
    for group in consumer.groups:
        _check_window(producer, consumer, group.index)


def compared(layout: EngineLayout) -> Iterator[tuple[str, object, str]]:
    """Yield the fields that must be equal for a transfer: name, value and remedy.

    They are equal on all ranks and for all TP sizes. Later fields are meaningless after one that
    differs.
    """
    same_model = "start both engines with the same model and dtype"
    same_layout = "start both engines with the same model, dtype and KV layout"
    yield "number of KV cache groups", len(layout.groups), same_model
    for group in layout.groups:
        where = f"of KV cache group {group.index}"
        yield f"kind {where}", group.kind, same_model
        yield f"window_tokens {where}", group.window_tokens, same_model
        yield f"layers {where}", [*group.parts], same_model
        for layer, parts in group.parts.items():
            yield f"parts of layer {layer!r}", len(parts), same_model
        for pages in group.layers:
            of = f"of layer {pages.layer!r}"
            # Packing comes first: its name explains why rows cannot be cut for other TP or block
            # sizes.
            yield f"packing {of}", pages.packing, same_layout
            yield f"number of KV heads {of}", pages.total_heads, same_layout
            yield f"stripes {of}", pages.stripes, same_layout
            if group.kind is GroupKind.STATE:
                yield f"rows {of}", pages.rows, same_layout
            else:
                yield f"tokens per row {of}", group.row_tokens(pages), "give both engines the same block_size"
            yield f"row_bytes {of}", pages.row_bytes, same_layout


def _common_parts(src: Group, dst: Group) -> list[tuple[LayerPages, LayerPages]]:
    theirs = dst.parts
    return [pair for layer, pages in src.parts.items() for pair in zip(pages, theirs[layer], strict=True)]


def _check_window(producer: EngineLayout, consumer: EngineLayout, index: int) -> None:
    """Raise IncompatiblePeerError if a partly filled block of the consumer gives wrong results.

    If the producer's block size is not a multiple of the consumer's, the producer may fill only a
    part of a consumer's block. This gives wrong results in two cases. If a window starts within the
    block, the consumer's prefix cache treats the block as complete. In a model with state groups,
    the rest of the block may hold bytes of an old state, which attention past the end of the prompt
    reads: vLLM does not zero blocks that a connector fills.
    """
    theirs, ours = producer.groups[index], consumer.groups[index]
    if ours.kind is GroupKind.STATE or not theirs.block_tokens % ours.block_tokens:
        return
    if any(group.kind is GroupKind.STATE for group in consumer.groups):
        raise IncompatiblePeerError(
            f"block_tokens of KV cache group {index}",
            ours.block_tokens,
            theirs.block_tokens,
            "for a model with state groups, set prefill's block_size to a multiple of decode's",
        )
    if consumer.caches_prefixes and ours.kind in WINDOWED:
        raise IncompatiblePeerError(
            f"block_tokens of KV cache group {index}",
            ours.block_tokens,
            theirs.block_tokens,
            "decode's prefix cache would treat a partly filled block as complete: turn decode's "
            "enable_prefix_caching off, or set prefill's block_size to a multiple of decode's",
        )


def unit_shape(src: Group, dst: Group) -> UnitShape:
    """Return the largest unit that lies in one block and one kernel block on both sides.

    For a state, it is the whole state. Raises PlanError if it would not be whole rows.
    """
    if src.kind is GroupKind.STATE:
        return UnitShape(1, 1, 1)
    parts = [(group, pages) for group in (src, dst) for pages in group.layers]
    blocks = [group.block_tokens // pages.kernel_blocks for group, pages in parts]
    tokens = math.gcd(src.block_tokens, dst.block_tokens, *blocks)
    for group, pages in parts:
        if tokens % group.row_tokens(pages):
            raise PlanError(
                f"layer {pages.layer!r}: blocks of {src.block_tokens} and {dst.block_tokens} tokens have units of "
                f"{tokens} tokens, but the kernel packs {group.row_tokens(pages)} tokens in one row; give both engines "
                "the same block_size"
            )
    return UnitShape(tokens, src.block_tokens // tokens, dst.block_tokens // tokens)


def consumer_ranks(producer: EngineLayout, consumer: EngineLayout) -> frozenset[int]:
    """Return the consumer ranks that exchange messages with this producer rank in each transfer.

    ``consumer`` may be any rank of its engine. The result is the ranks to which the producer rank
    sends a share. A rank without any share also holds blocks until the transfer ends, so it
    exchanges messages with one consumer rank: its own number modulo the number of consumer ranks.
    """
    ranks = set()
    for group in producer.groups:
        for layer_index, pages in numbered(group, producer.groups):
            for share in _shares(producer, consumer, layer_index, pages.total_heads):
                if share.producer_rank == producer.tp_rank:
                    ranks.add(share.consumer_rank)
    return frozenset(ranks or {producer.tp_rank % consumer.tp_size})


def _shares(producer: EngineLayout, consumer: EngineLayout, layer_index: int, heads: int) -> tuple[HeadShare, ...]:
    return head_shares(producer.tp_size, consumer.tp_size, heads, layer_index, model_layer_count(producer.groups))


def plan_pair(producer: EngineLayout, consumer: EngineLayout) -> PairPlan:
    """Plan the copies from one producer rank to one consumer rank, whose layouts are compatible.

    Raises PlanError if the block sizes have no common unit of whole rows.
    """
    groups = tuple(_plan_group(producer, consumer, index) for index in range(len(producer.groups)))
    return PairPlan(producer.tp_rank, consumer.tp_rank, groups)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Byte range of one unit, as offsets from the page addresses of both sides, and its length."""

    src: int
    dst: int
    length: int


_Column = tuple[int, LayerPages, LayerPages, _Piece]


def _plan_group(producer: EngineLayout, consumer: EngineLayout, group: int) -> GroupPlan:
    src, dst = producer.groups[group], consumer.groups[group]
    shape = unit_shape(src, dst)
    layer_indices = {pages.layer: index for index, pages in numbered(src, producer.groups)}
    columns: list[_Column] = []
    for src_pages, dst_pages in _common_parts(src, dst):
        layer_index = layer_indices[src_pages.layer]
        rows = src_pages.rows if src.kind is GroupKind.STATE else shape.tokens // src.row_tokens(src_pages)
        for share in _shares(producer, consumer, layer_index, src_pages.total_heads):
            if (share.producer_rank, share.consumer_rank) == (producer.tp_rank, consumer.tp_rank):
                first = (share.first - _first_head(producer, src_pages), share.first - _first_head(consumer, dst_pages))
                pieces = _pieces(src_pages, dst_pages, first, share.stop - share.first, rows)
                columns += [(layer_index, src_pages, dst_pages, piece) for piece in pieces]
    first_layer = min(layer_indices.values(), default=0)
    each = Pieces(
        _side(src, shape, shape.src_units, [(pages, piece.src) for _, pages, _, piece in columns]),
        _side(dst, shape, shape.dst_units, [(pages, piece.dst) for _, _, pages, piece in columns]),
        np.asarray([piece.length for *_, piece in columns], np.int64),
    )
    # For example K and V of a head. Digests have a stream per layer, so layers stay apart here.
    by_layer, layer_of = each.joined(np.asarray([index - first_layer for index, *_ in columns], np.int64))
    return GroupPlan(shape, by_layer.src, by_layer.dst, by_layer.piece_bytes, layer_of)


def _first_head(engine: EngineLayout, pages: LayerPages) -> int:
    return held_heads(engine.tp_rank, engine.tp_size, pages.total_heads).start


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


def _pieces(src: LayerPages, dst: LayerPages, first: tuple[int, int], heads: int, rows: int) -> list[_Piece]:
    """Divide ``heads`` heads of ``rows`` rows into the fewest ranges contiguous on both sides.

    ``first`` has the index of the first head among each rank's heads.
    """
    src_head, dst_head = first
    if src_head + heads > src.heads or dst_head + heads > dst.heads:
        raise PlanError(f"layer {src.layer!r}: a share of {heads} heads exceeds the heads of a rank")
    axes = [
        (heads, src.head_stride_bytes, dst.head_stride_bytes),
        (src.stripes, src.stripe_stride_bytes, dst.stripe_stride_bytes),
        (rows, src.row_stride_bytes, dst.row_stride_bytes),
    ]
    left = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1])
    length = src.row_bytes
    while left and left[0][1] == left[0][2] == length:
        length *= left.pop(0)[0]
    src_base, dst_base = src_head * src.head_stride_bytes, dst_head * dst.head_stride_bytes
    return [
        _Piece(
            src_base + sum(at * axis[1] for at, axis in zip(position, left, strict=True)),
            dst_base + sum(at * axis[2] for at, axis in zip(position, left, strict=True)),
            length,
        )
        for position in itertools.product(*(range(axis[0]) for axis in left))
    ]
