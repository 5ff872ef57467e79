"""A worker's cache without its layouts: tensors of (blocks, page bytes), and where each layer's page lies in them.

A storage back end needs block ids and bytes only. Layers that share memory refer to one tensor: all groups of a hybrid
cache, or all layers of a block where blocks are outermost. vLLM's ``CanonicalKVCaches`` has the same shape
(vllm/v1/kv_offload/base.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from connectors.errors import PlanError
from connectors.planning.layout import EngineLayout


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """``num_blocks`` pages of ``page_bytes`` bytes, padding included, one after the other from ``address``."""

    address: int
    num_blocks: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalRef:
    """A layer's content in each page of tensor number ``tensor``: ``size_bytes`` from ``offset``, without padding."""

    layer: str
    tensor: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalCache:
    """``groups[g]`` are the layers of group g in their order."""

    tensors: tuple[CanonicalTensor, ...]
    groups: tuple[tuple[CanonicalRef, ...], ...]


def canonical_cache(layout: EngineLayout) -> CanonicalCache:
    """Describe a worker's cache by tensors and references.

    Raises PlanError for a layer whose page does not lie in one piece of each block: heads outside the blocks, say.
    """
    spans = [_spans(layout, group) for group in range(len(layout.groups))]
    bases: list[tuple[int, int]] = []
    for stride, start, stop in sorted({(stride, start, stop) for group in spans for _, stride, start, stop in group}):
        if not bases or bases[-1][0] != stride or stop > bases[-1][1] + stride:
            bases.append((stride, start))
    refs = []
    for group in spans:
        found = []
        for layer, stride, start, stop in group:
            number = max(i for i, (size, base) in enumerate(bases) if size == stride and base <= start)
            found.append(CanonicalRef(layer, number, start - bases[number][1], stop - start))
        refs.append(tuple(found))
    tensors = tuple(CanonicalTensor(base, layout.num_blocks, stride) for stride, base in bases)
    return CanonicalCache(tensors, tuple(refs))


def _spans(layout: EngineLayout, group: int) -> list[tuple[str, int, int, int]]:
    """(layer, block stride, start and end of its page of block 0) of a group's layers."""
    found: dict[str, tuple[str, int, int, int]] = {}
    for pages in layout.groups[group].layers:
        start, stop = pages.address, pages.address + pages.last_offset
        if pages.layer in found:
            _, stride, first, last = found[pages.layer]
            if stride != pages.block_stride_bytes:
                raise PlanError(f"layer {pages.layer!r}: its parts have blocks of unequal size")
            start, stop = min(first, start), max(last, stop)
        if stop - start > pages.block_stride_bytes:
            raise PlanError(f"layer {pages.layer!r}: its page does not lie in one piece of each block")
        found[pages.layer] = (pages.layer, pages.block_stride_bytes, start, stop)
    return list(found.values())
