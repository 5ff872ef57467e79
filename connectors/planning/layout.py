"""Layout of one worker's KV cache in bytes: regions, groups and pages.

Terms: a *region* is one registered range of memory, unique by base address. A *group* is an HMA cache group, its own
namespace of block ids. A *page* is what one block holds of one layer. Several layers of different groups may lie in
one region; their pages are told apart by block id only, because all groups draw ids from one pool.

    address of (block b, kernel block k, head h, stripe s, row r) of a layer = address
        + b * block_stride_bytes + k * kernel_block_stride_bytes
        + h * head_stride_bytes + s * stripe_stride_bytes + r * row_stride_bytes

and ``row_bytes`` bytes lie there. A *row* is what cannot be cut: one token, or several that a kernel packs together.
A *stripe* is a part of a head's content that a kernel keeps apart for all tokens of a block: K by columns, say.
A *kernel block* is what the attention kernel takes for a block where the allocator's are larger. A layer whose page
is not regular in this sense is described as several layers, its *parts*: CPU attention's K and V, a Mamba layer's
convolution and recurrent state.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from connectors.errors import PlanError
from connectors.planning.heads import held_heads


class GroupKind(StrEnum):
    """Tokens that a group's layers attend to.

    ``FULL`` all, ``SLIDING`` those in a window of ``window_tokens``, ``CHUNKED`` those of the current chunk of
    ``window_tokens``. ``STATE`` keeps one running state per request and no tokens.
    """

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"


WINDOWED = frozenset({GroupKind.SLIDING, GroupKind.CHUNKED})


@dataclass(frozen=True, slots=True, order=True)
class MemoryKind:
    """Kind of memory and its device. ``memory`` is NIXL's name, ``DRAM`` or ``VRAM``; host memory is device 0."""

    memory: str
    device: int


@dataclass(frozen=True, slots=True)
class Region:
    """One range of memory to register."""

    address: int
    length_bytes: int
    memory_kind: MemoryKind

    @property
    def end(self) -> int:
        return self.address + self.length_bytes


@dataclass(frozen=True, slots=True)
class LayerPages:
    """One layer's pages on one worker. Strides and sizes are bytes.

    ``total_heads`` counts the KV heads of the whole model, ``heads`` those held here (``heads.held_heads`` says which):
    whatever is split over tensor-parallel ranks in equal parts counts as heads, MLA's one latent as a single one.
    ``rows`` are those of one head's stripe in one kernel block. ``packing`` names how bytes lie within a row; two
    engines exchange bytes only where it is equal.
    """

    layer: str
    address: int
    block_stride_bytes: int
    total_heads: int
    heads: int
    head_stride_bytes: int
    rows: int
    row_stride_bytes: int
    row_bytes: int
    packing: str
    kernel_blocks: int = 1
    kernel_block_stride_bytes: int = 0
    stripes: int = 1
    stripe_stride_bytes: int = 0

    def __post_init__(self) -> None:
        counts = (self.total_heads, self.heads, self.rows, self.kernel_blocks, self.stripes)
        sizes = (self.block_stride_bytes, self.head_stride_bytes, self.row_bytes)
        if min(*counts, *sizes) <= 0 or self.row_stride_bytes < self.row_bytes:
            raise PlanError(f"layer {self.layer!r}: sizes and strides must be positive and rows must not overlap")
        for count, stride in (
            (self.kernel_blocks, self.kernel_block_stride_bytes),
            (self.stripes, self.stripe_stride_bytes),
        ):
            if (count == 1) != (stride == 0) or stride < 0:
                raise PlanError(
                    f"layer {self.layer!r}: several stripes or kernel blocks have a stride, a single one none"
                )

    @property
    def page_bytes(self) -> int:
        """Bytes of content in one block (padding not counted)."""
        return self.kernel_blocks * self.heads * self.stripes * self.rows * self.row_bytes

    @property
    def last_offset(self) -> int:
        """Offset of the end of a page's last byte from the page's address."""
        return (
            (self.kernel_blocks - 1) * self.kernel_block_stride_bytes
            + (self.heads - 1) * self.head_stride_bytes
            + (self.stripes - 1) * self.stripe_stride_bytes
            + (self.rows - 1) * self.row_stride_bytes
            + self.row_bytes
        )


@dataclass(frozen=True, slots=True)
class Group:
    """One HMA cache group: layers that share block tables of ``block_tokens`` tokens a block.

    A state group's ``block_tokens`` says how often the allocator starts another state, and nothing about bytes.
    """

    index: int
    kind: GroupKind
    block_tokens: int
    window_tokens: int | None
    layers: tuple[LayerPages, ...]

    def __post_init__(self) -> None:
        if self.block_tokens <= 0:
            raise PlanError(f"group {self.index}: block_tokens must be positive, not {self.block_tokens}")
        if (self.kind in WINDOWED) != (self.window_tokens is not None) or self.window_tokens == 0:
            raise PlanError(f"group {self.index}: a window belongs to sliding and chunked groups, and to them only")
        names = [pages.layer for pages in self.layers]
        if len({*names}) != 1 + sum(a != b for a, b in itertools.pairwise(names)) and names:
            raise PlanError(f"group {self.index}: the parts of a layer must follow each other")
        for pages in self.layers:
            if self.kind is GroupKind.STATE and pages.kernel_blocks > 1:
                raise PlanError(f"layer {pages.layer!r}: a state has no kernel blocks")
            if self.kind is not GroupKind.STATE and self.block_tokens % (pages.kernel_blocks * pages.rows):
                rows = pages.kernel_blocks * pages.rows
                raise PlanError(f"layer {pages.layer!r}: {self.block_tokens} tokens do not fill {rows} rows evenly")

    @property
    def block_bytes(self) -> int:
        """Bytes of content that one block id stands for, over all layers of the group, on this worker."""
        return sum(pages.page_bytes for pages in self.layers)

    def row_tokens(self, pages: LayerPages) -> int:
        """Tokens in one row of ``pages``."""
        return self.block_tokens // (pages.kernel_blocks * pages.rows)


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """One worker's whole cache: rank ``tp_rank`` of ``tp_size``.

    ``caches_prefixes``: the engine keeps full blocks for later requests, so each must hold all that its tokens wrote.
    """

    tp_rank: int
    tp_size: int
    num_blocks: int
    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    caches_prefixes: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise PlanError(f"tp_rank {self.tp_rank} does not exist in a group of {self.tp_size}")
        if [group.index for group in self.groups] != list(range(len(self.groups))):
            raise PlanError("groups must be listed in the order of their index, none missing")
        if len({region.memory_kind for region in self.regions}) != 1:
            raise PlanError("a worker's cache must lie in one kind of memory, on one device")
        for group in self.groups:
            for pages in group.layers:
                self._check_inside(pages)

                held = len(held_heads(self.tp_rank, self.tp_size, pages.total_heads))
                if held != pages.heads:
                    raise PlanError(
                        f"layer {pages.layer!r}: rank {self.tp_rank} of {self.tp_size} holds {pages.heads} of "
                        f"{pages.total_heads} heads where an even split gives it {held}"
                    )

    @property
    def memory_kind(self) -> MemoryKind:
        return self.regions[0].memory_kind

    @property
    def layer_heads(self) -> frozenset[tuple[int, int]]:
        """(layer index, total heads) of every part; with the TP sizes they determine which ranks are partners."""
        return frozenset(
            (layer_index, pages.total_heads)
            for group in self.groups
            for layer_index, pages in numbered(group, self.groups)
        )

    def _check_inside(self, pages: LayerPages) -> None:
        last = pages.address + (self.num_blocks - 1) * pages.block_stride_bytes + pages.last_offset
        if not any(region.address <= pages.address and last <= region.end for region in self.regions):
            raise PlanError(f"layer {pages.layer!r}: its {self.num_blocks} pages do not lie inside one region")


def numbered(group: Group, groups: Sequence[Group]) -> list[tuple[int, LayerPages]]:
    """The parts of a group with the number of their layer; parts of one layer follow each other and share it."""
    layer_index = sum(len({pages.layer for pages in before.layers}) for before in groups[: group.index]) - 1
    found, last = [], None
    for pages in group.layers:
        layer_index, last = layer_index + (pages.layer != last), pages.layer
        found.append((layer_index, pages))
    return found


def unique_regions(spans: Iterable[Region]) -> tuple[Region, ...]:
    """Merge the memory of all layers into the ranges to register: each byte once, each base address once.

    Layers share tensors under the hybrid allocator (Gemma-3-4B: 34 layers, 5 tensors), and tensors may be slices of
    one storage. Spans that overlap become one region; spans that only touch stay two, because they may be two
    allocations.
    """
    merged: list[Region] = []
    for span in sorted(spans, key=lambda s: (s.memory_kind, s.address, -s.length_bytes)):
        last = merged[-1] if merged else None
        if last is not None and last.memory_kind == span.memory_kind and span.address < last.end:
            merged[-1] = Region(last.address, max(last.end, span.end) - last.address, last.memory_kind)
        else:
            merged.append(span)
    return tuple(merged)
