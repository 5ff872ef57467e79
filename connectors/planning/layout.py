"""What one worker's KV cache looks like as bytes: regions, groups and pages.

Words: a *region* is one registered range of memory, unique by base address. A *group* is an HMA cache group, its own
namespace of block ids. A *page* is what one block holds of one layer. Several layers of different groups may lie in
one region; their pages are told apart by block id only, because all groups draw ids from one pool.

    address of (block b, head h, token t) of a layer
        = address + b * block_stride_bytes + h * head_stride_bytes + t * row_stride_bytes

and ``row_bytes`` bytes lie there. A layout whose tokens cannot be told apart within a head (CPU attention packs K
rows, then V rows) is described as one row per block: ``rows = 1``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from connectors.errors import PlanError


class GroupKind(StrEnum):
    """How a group's layers look back: at everything, or through a window of ``window_tokens``."""

    FULL = "full"
    SLIDING = "sliding"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where memory lies. ``memory`` is NIXL's word for its kind, ``DRAM`` or ``VRAM``; host memory is device 0."""

    memory: str
    device: int


@dataclass(frozen=True, slots=True)
class Region:
    """One range of memory to register."""

    address: int
    length_bytes: int
    place: Place

    @property
    def end(self) -> int:
        return self.address + self.length_bytes


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages on one worker. Strides and sizes are bytes; ``heads`` counts the KV heads held here.

    ``packing`` names how bytes lie within a row. Two engines exchange bytes only where it is equal.
    """

    layer: str
    address: int
    block_stride_bytes: int
    heads: int
    head_stride_bytes: int
    rows: int
    row_stride_bytes: int
    row_bytes: int
    packing: str

    def __post_init__(self) -> None:
        sizes = (self.block_stride_bytes, self.heads, self.head_stride_bytes, self.rows, self.row_bytes)
        if min(sizes) <= 0 or self.row_stride_bytes < self.row_bytes:
            raise PlanError(f"layer {self.layer!r}: sizes and strides must be positive and rows must not overlap")

    @property
    def head_bytes(self) -> int:
        """Bytes that one block holds of one head."""
        return self.rows * self.row_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of content in one block (padding not counted)."""
        return self.heads * self.head_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """One HMA cache group: layers that share block tables of ``block_tokens`` tokens a block."""

    index: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int | None
    layers: tuple[LayerPages, ...]

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise PlanError(f"group {self.index}: block_tokens must be positive, not {self.block_tokens}")
        if (self.kind is GroupKind.SLIDING) != (self.window_tokens is not None):
            raise PlanError(f"group {self.index}: a window belongs to sliding groups, and to them only")

    @property
    def block_bytes(self) -> int:
        """Bytes of content that one block id stands for, over all layers of the group, on this worker."""
        return sum(pages.page_bytes for pages in self.layers)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One worker's whole cache: rank ``tp_rank`` of ``tp_size``, of a model with ``kv_heads`` KV heads in all."""

    tp_rank: int
    tp_size: int
    kv_heads: int
    num_blocks: int
    regions: tuple[Region, ...]
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise PlanError(f"tp_rank {self.tp_rank} does not exist in a group of {self.tp_size}")
        if [group.index for group in self.groups] != list(range(len(self.groups))):
            raise PlanError("groups must be listed in the order of their index, none missing")
        if len({region.place for region in self.regions}) != 1:
            raise PlanError("a worker's cache must lie in one kind of memory, on one device")
        for group in self.groups:
            for pages in group.layers:
                self._check_inside(pages)

    @property
    def place(self) -> Place:
        return self.regions[0].place

    def _check_inside(self, pages: LayerPages) -> None:
        last = (
            pages.address
            + (self.num_blocks - 1) * pages.block_stride_bytes
            + (pages.heads - 1) * pages.head_stride_bytes
            + (pages.rows - 1) * pages.row_stride_bytes
            + pages.row_bytes
        )
        if not any(region.address <= pages.address and last <= region.end for region in self.regions):
            raise PlanError(f"layer {pages.layer!r}: its {self.num_blocks} pages do not lie inside one region")


def unique_regions(spans: Iterable[Region]) -> tuple[Region, ...]:
    """Merge the memory of all layers into the ranges to register: each byte once, each base address once.

    Layers share tensors under the hybrid allocator (Gemma-3-4B: 34 layers, 5 tensors), and tensors may be slices of
    one storage. Spans that overlap become one region; spans that only touch stay two, because they may be two
    allocations.
    """
    merged: list[Region] = []
    for span in sorted(spans, key=lambda s: (s.place, s.address, -s.length_bytes)):
        last = merged[-1] if merged else None
        if last is not None and last.place == span.place and span.address < last.end:
            merged[-1] = Region(last.address, max(last.end, span.end) - last.address, last.place)
        else:
            merged.append(span)
    return tuple(merged)
