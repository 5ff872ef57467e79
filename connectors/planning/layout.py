"""Describe the KV cache of one worker in bytes: regions, groups and pages.

region        one range of memory registered with the transport, unique by base address
group         a cache group of vLLM's hybrid memory allocator (HMA), with its own block ids
page          content of one block in one layer
row           smallest part of a page that can be cut: one token, or several packed together; in a
              state, a range of bytes
stripe        part of a head's content that a kernel stores separately for all tokens of a block,
              for example K by columns
kernel block  block of the attention kernel, if it is smaller than the allocator's block

    address of (block b, kernel block k, head h, stripe s, row r) of a layer = address
        + b * block_stride_bytes + k * kernel_block_stride_bytes
        + h * head_stride_bytes + s * stripe_stride_bytes + r * row_stride_bytes

Each row has ``row_bytes`` bytes. Layers of different groups may share a region: all groups allocate
block ids from one pool, so their pages have different block ids. A layout describes a layer with an
irregular page by several ``LayerPages``, its *parts*. Examples are K and V of CPU attention, and
convolution and recurrent state of a Mamba layer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from connectors.errors import PlanError
from connectors.planning.heads import held_heads


class GroupKind(StrEnum):
    """Tokens that a layer attends to: all, the last ``window_tokens``, the current chunk of that
    many tokens, or none (one recurrent state per request).
    """

    FULL = "full"
    SLIDING = "sliding"
    CHUNKED = "chunked"
    STATE = "state"


WINDOWED = frozenset({GroupKind.SLIDING, GroupKind.CHUNKED})


@dataclass(frozen=True, slots=True, order=True)
class MemoryKind:
    """Location of memory: NIXL's name, ``DRAM`` or ``VRAM``, and the device; 0 for host memory."""

    memory: str
    device: int


@dataclass(frozen=True, slots=True)
class Region:
    address: int
    length_bytes: int
    memory_kind: MemoryKind

    @property
    def end(self) -> int:
        return self.address + self.length_bytes


@dataclass(frozen=True, slots=True)
class LayerPages:
    """Pages of one layer, or of one part of a layer, on one worker. Strides are in bytes.

    ``address``        address of the first content byte of block 0
    ``total_heads``    KV heads of the layer over all TP ranks, or other divisions of a page that TP
                       splits evenly over ranks; 1 for MLA's latent
    ``rows``           rows of one head's stripe in one kernel block
    ``packing``        name of the byte order within a row; equal packings are interchangeable
    ``kernel_blocks``  kernel blocks per block; with 1, ``kernel_block_stride_bytes`` is 0
    ``stripes``        stripes per head and kernel block; with 1, ``stripe_stride_bytes`` is 0

    Raises PlanError for values that contradict each other or are not positive.
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
                    f"layer {self.layer!r}: the stride of stripes or kernel blocks must be positive if there are "
                    "several, and 0 if there is one"
                )

    @property
    def page_bytes(self) -> int:
        """Bytes of content in one block, without padding."""
        return self.kernel_blocks * self.heads * self.stripes * self.rows * self.row_bytes

    @property
    def last_offset(self) -> int:
        return (
            (self.kernel_blocks - 1) * self.kernel_block_stride_bytes
            + (self.heads - 1) * self.head_stride_bytes
            + (self.stripes - 1) * self.stripe_stride_bytes
            + (self.rows - 1) * self.row_stride_bytes
            + self.row_bytes
        )


@dataclass(frozen=True, slots=True)
class Group:
    """A cache group of vLLM's hybrid memory allocator: layers that share a request's block table.

    ``block_tokens``   tokens per block; for a state group, tokens between two states
    ``window_tokens``  window or attention chunk size in tokens; None for full attention and states
    ``layers``         pages of the layers, one entry per part, a layer's parts adjacent; empty in
                       the scheduler, which has no tensors

    Raises PlanError for values that contradict each other or are not positive.
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
            raise PlanError(
                f"group {self.index}: window_tokens must be positive for sliding and chunked groups, else None"
            )
        names = [pages.layer for pages in self.layers]
        if len({*names}) != 1 + sum(a != b for a, b in itertools.pairwise(names)) and names:
            raise PlanError(f"group {self.index}: the parts of a layer must be adjacent")
        for pages in self.layers:
            if self.kind is GroupKind.STATE and pages.kernel_blocks > 1:
                raise PlanError(f"layer {pages.layer!r}: a state cannot have kernel blocks")
            rows = pages.kernel_blocks * pages.rows
            if self.kind is not GroupKind.STATE and self.block_tokens % rows:
                raise PlanError(f"layer {pages.layer!r}: {self.block_tokens} tokens cannot be divided into {rows} rows")

    @property
    def block_bytes(self) -> int:
        """Bytes of content per block on this worker, summed over the group's layers."""
        return sum(pages.page_bytes for pages in self.layers)

    @property
    def kept_tokens(self) -> int:
        """Tokens for which a running sequence keeps blocks; 0: all of its tokens."""
        return self.block_tokens if self.kind is GroupKind.STATE else self.window_tokens or 0

    def row_tokens(self, pages: LayerPages) -> int:
        """Return the number of tokens in one row of ``pages``; meaningless for a state group."""
        return self.block_tokens // (pages.kernel_blocks * pages.rows)

    @property
    def parts(self) -> dict[str, list[LayerPages]]:
        """The layers by name, in model order, each with its parts."""
        found: dict[str, list[LayerPages]] = {}
        for pages in self.layers:
            found.setdefault(pages.layer, []).append(pages)
        return found


@dataclass(frozen=True, slots=True)
class EngineLayout:
    """Cache layout of one worker of a tensor-parallel engine.

    ``num_blocks``       blocks of the pool that all groups share, vLLM's null block included
    ``caches_prefixes``  whether prefix caching is on. A later request may then reuse any full
                         block, so a transfer must fill the whole block

    Raises PlanError for values that contradict each other.
    """

    tp_rank: int
    tp_size: int
    num_blocks: int
    regions: tuple[Region, ...]
    groups: tuple[Group, ...]
    caches_prefixes: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise PlanError(f"tp_rank {self.tp_rank} must be at least 0 and below tp_size {self.tp_size}")
        if [group.index for group in self.groups] != list(range(len(self.groups))):
            raise PlanError("groups must be sorted by index, without gaps")
        if len({region.memory_kind for region in self.regions}) != 1:
            raise PlanError("a worker must have regions, all of one memory kind (memory and device)")
        for group in self.groups:
            for pages in group.layers:
                self._check_inside(pages)
                held = len(held_heads(self.tp_rank, self.tp_size, pages.total_heads))
                if held != pages.heads:
                    raise PlanError(
                        f"layer {pages.layer!r}: rank {self.tp_rank} of {self.tp_size} holds {pages.heads} of "
                        f"{pages.total_heads} heads, but an even split gives it {held}"
                    )

    @property
    def memory_kind(self) -> MemoryKind:
        return self.regions[0].memory_kind

    def _check_inside(self, pages: LayerPages) -> None:
        last = pages.address + (self.num_blocks - 1) * pages.block_stride_bytes + pages.last_offset
        if not any(region.address <= pages.address and last <= region.end for region in self.regions):
            raise PlanError(f"layer {pages.layer!r}: its {self.num_blocks} pages are not inside one region")


def model_layer_count(groups: Sequence[Group]) -> int:
    return sum(len(group.parts) for group in groups)


def numbered(group: Group, groups: Sequence[Group]) -> list[tuple[int, LayerPages]]:
    """Return (layer index, pages) of each part of a group.

    Layer indices number the layers of all ``groups``, group by group. All parts of a layer have its
    index.
    """
    first = model_layer_count(groups[: group.index])
    index_of = {layer: index for index, layer in enumerate(group.parts, first)}
    return [(index_of[pages.layer], pages) for pages in group.layers]


def unique_regions(spans: Iterable[Region]) -> tuple[Region, ...]:
    """Merge the memory of all layers into regions: each byte once, each base address once.

    Layers share tensors under the hybrid allocator (Gemma-3-4B: 34 layers, 5 tensors), and tensors
    may be slices of one storage. Overlapping ranges become one region. Adjacent ranges remain two
    regions, because they may be two allocations.
    """
    merged: list[Region] = []
    for span in sorted(spans, key=lambda s: (s.memory_kind, s.address, -s.length_bytes)):
        last = merged[-1] if merged else None
        if last is not None and last.memory_kind == span.memory_kind and span.address < last.end:
            merged[-1] = Region(last.address, max(last.end, span.end) - last.address, last.memory_kind)
        else:
            merged.append(span)
    return tuple(merged)
