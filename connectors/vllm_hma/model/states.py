"""Layout of a state layer's page, and vLLM's split of it over tensor-parallel ranks.

vLLM stores one int8 page per state, with the tensors of ``MambaSpec.shapes`` one after another
without gaps:

    Mamba-1            conv [channels]            recurrent (channels, state)
    Mamba-2            conv [x | B | C]           recurrent (heads, head size, state)
    gated delta net    conv [q | k | v]           recurrent (value heads, value size, key size)
    short convolution  conv [channels]
    linear attention                              recurrent (heads, size, size)

vLLM splits each section in brackets, and the first dimension of a recurrent state, evenly over the
ranks. B and C of a Mamba-2 model with a single group are replicated on every rank. A convolution
state holds its last tokens as (channels, tokens), called DS, or as (tokens, channels), SD.

Two kinds of states move as one opaque page. A state that vLLM replicates as a whole on every rank
moves between engines of any TP sizes. One that does not match the table, or whose number of Mamba-2
groups is unknown, moves between engines of equal TP size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import torch
from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from connectors.errors import UnsupportedCacheError
from connectors.planning.layout import LayerPages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import MambaSpec

_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
"""Configuration attributes that hold the number of Mamba-2 groups, by model family."""


@dataclass(frozen=True, slots=True)
class _Section:
    """Section of a state: ``units`` of ``total`` units on this rank.

    ``width``  size of a unit: in elements (of a convolution state, per token), or in bytes per row
               for ``_Page.part``
    """

    name: str
    units: int
    total: int
    width: int


def state_parts(
    config: VllmConfig, layer: str, spec: MambaSpec, view: torch.Tensor, num_blocks: int
) -> list[LayerPages]:
    """``view`` has shape (blocks, 1, 1, bytes). Raises UnsupportedCacheError."""
    blocks, heads, states, content = view.shape
    held = sum(prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True))
    if (blocks, heads, states, view.element_size()) != (num_blocks, 1, 1, 1) or content < held:
        raise UnsupportedCacheError(
            layer,
            f"its states have {held} bytes, but vLLM's view is {tuple(view.shape)} of {view.dtype}",
        )
    page = _Page(layer, view.data_ptr(), view.stride(0), _packing(spec, view.device.type))
    tp_size = config.parallel_config.tensor_parallel_size
    if spec.tp_replicated:
        return [page.whole("replicated", 0, held, 1)]
    sections = _sections(config, spec, tp_size)
    if sections is None:
        return [page.whole(f"of {tp_size} ranks", 0, held, tp_size)]
    return list(_parts(page, spec, sections))


@dataclass(frozen=True, slots=True)
class _Page:
    layer: str
    address: int
    block_stride_bytes: int
    packing: str

    def whole(self, name: str, offset: int, size_bytes: int, total: int) -> LayerPages:
        return self.part(_Section(name, 1, total, size_bytes), offset, size_bytes, 1, size_bytes)

    def part(self, section: _Section, offset: int, unit_stride: int, rows: int, row_stride: int) -> LayerPages:
        """Each unit of ``section`` is ``rows`` rows. All sizes are in bytes."""
        return LayerPages(
            layer=self.layer,
            address=self.address + offset,
            block_stride_bytes=self.block_stride_bytes,
            total_heads=section.total,
            heads=section.units,
            head_stride_bytes=unit_stride,
            rows=rows,
            row_stride_bytes=row_stride,
            row_bytes=section.width,
            packing=f"{self.packing}/{section.name}",
        )


def _packing(spec: MambaSpec, device: str) -> str:
    # The device is part of the packing: kernels order a head's state differently (gated delta net
    # on the CPU: key, then value).
    dtypes = "+".join(str(dtype).removeprefix("torch.") for dtype in spec.dtypes)
    return f"state/{device}/{spec.mamba_type.name}/{get_conv_state_layout()}/{dtypes}"


def _sections(config: VllmConfig, spec: MambaSpec, tp_size: int) -> tuple[list[_Section], list[_Section]] | None:
    """Return the sections of the convolution and of the recurrent state, with widths in elements.
    None for what does not match the module's table, and for an unknown number of Mamba-2 groups.
    """
    kind, last = spec.mamba_type, spec.shapes[-1]
    if kind is MambaAttentionBackendEnum.LINEAR and len(spec.shapes) == 1:
        return [], [_Section("heads", last[0], last[0] * tp_size, prod(last[1:]))]
    channels = _channels(spec.shapes[0])
    if kind is MambaAttentionBackendEnum.SHORT_CONV and len(spec.shapes) == 1:
        return [_Section("channels", channels, channels * tp_size, 1)], []
    if len(spec.shapes) != 2:
        return None
    recurrent = [_Section("heads", last[0], last[0] * tp_size, prod(last[1:]))]
    if kind is MambaAttentionBackendEnum.MAMBA1:
        return [_Section("channels", channels, channels * tp_size, 1)], recurrent
    if kind is MambaAttentionBackendEnum.MAMBA2:
        heads, head_size, state_size = last
        groups = (channels - heads * head_size) // (2 * state_size)
        total = _total_groups(config, groups, tp_size)
        if total is None or channels != heads * head_size + 2 * groups * state_size:
            return None
        sides = [_Section(name, groups, total, state_size) for name in ("B", "C")]
        return [_Section("x", heads, heads * tp_size, head_size), *sides], recurrent
    if kind is MambaAttentionBackendEnum.GDN_ATTN:
        values, value_size, key_size = last
        keys = (channels - values * value_size) // (2 * key_size)
        if channels != values * value_size + 2 * keys * key_size:
            return None
        sides = [_Section(name, keys, keys * tp_size, key_size) for name in ("q", "k")]
        return [*sides, _Section("v", values, values * tp_size, value_size)], recurrent
    return None


def _channels(shape: tuple[int, ...]) -> int:
    return shape[0] if get_conv_state_layout() == "DS" else shape[1]


def _total_groups(config: VllmConfig, groups: int, tp_size: int) -> int | None:
    """Return the number of Mamba-2 groups in the model; None if unknown.

    A single group on this rank is one of ``tp_size``, or a replica of the model's only group; only
    the model's configuration distinguishes them.
    """
    if groups > 1 or tp_size == 1:
        return groups * tp_size
    hf_config = config.model_config.hf_text_config
    total = next((getattr(hf_config, name) for name in _GROUPS if hasattr(hf_config, name)), None)
    return total if total in (1, tp_size) else None


def _parts(page: _Page, spec: MambaSpec, sections: tuple[list[_Section], list[_Section]]) -> Iterator[LayerPages]:
    convolution, recurrent = sections
    offset = 0
    if convolution:
        size, shape = spec.dtypes[0].itemsize, spec.shapes[0]
        channels = _channels(shape)
        tokens = prod(shape) // channels
        start = 0
        for section in convolution:
            if get_conv_state_layout() == "DS":
                unit = section.width * tokens * size
                yield page.part(replace(section, width=unit), offset + start * tokens * size, unit, 1, unit)
            else:
                unit = section.width * size
                yield page.part(replace(section, width=unit), offset + start * size, unit, tokens, channels * size)
            start += section.units * section.width
        offset += prod(shape) * size
    for section in recurrent:
        unit = section.width * spec.dtypes[-1].itemsize
        yield page.part(replace(section, width=unit), offset, unit, 1, unit)
