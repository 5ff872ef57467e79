"""Describe a worker's cache as tensors of (blocks, page bytes); layers are byte ranges of pages.

This form suffices for copies that need only block ids and bytes, not heads or tokens. Layers that
share memory refer to one tensor: layers of different groups in a hybrid cache, or all layers if the
block is the outermost dimension. vLLM's ``CanonicalKVCaches`` (vllm/v1/kv_offload/base.py) is
similar. Only tests use this module; the KV store plans its copies with ``plan.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from connectors.errors import PlanError
from connectors.planning.layout import EngineLayout


@dataclass(frozen=True, slots=True)
class CanonicalTensor:
    """Consecutive pages of equal size, one per block.

    ``address``     address of block 0's page
    ``num_blocks``  number of pages
    ``page_bytes``  bytes per page, padding included
    """

    address: int
    num_blocks: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalRef:
    """Location of one layer's content in each page of a tensor.

    ``tensor``      index into ``CanonicalCache.tensors``
    ``offset``      bytes from the start of the page
    ``size_bytes``  bytes of content, without padding
    """

    layer: str
    tensor: int
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class CanonicalCache:
    """A worker's cache: all tensors, and one reference per layer of each group in layer order."""

    tensors: tuple[CanonicalTensor, ...]
    groups: tuple[tuple[CanonicalRef, ...], ...]


def canonical_cache(layout: EngineLayout) -> CanonicalCache:
    """Describe a worker's cache by tensors and references.

    Raises PlanError if a layer's page is not one contiguous range of each block, for example if
    heads are outside the block dimension, or if the parts of a layer have unequal block strides.
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
    """Return (layer, block stride, start address, end address) of block 0's page, for each layer.

    Raises PlanError as described in ``canonical_cache``.
    """
    found: dict[str, tuple[str, int, int, int]] = {}
    for pages in layout.groups[group].layers:
        start, stop = pages.address, pages.address + pages.last_offset
        if pages.layer in found:
            _, stride, first, last = found[pages.layer]
            if stride != pages.block_stride_bytes:
                raise PlanError(f"layer {pages.layer!r}: its parts have unequal block strides")
            start, stop = min(first, start), max(last, stop)
        if stop - start > pages.block_stride_bytes:
            raise PlanError(
                f"layer {pages.layer!r}: its page is not contiguous within a block; "
                "use a KV cache layout with blocks outermost"
            )
        found[pages.layer] = (pages.layer, pages.block_stride_bytes, start, stop)
    return list(found.values())
