"""Byte order of a block in vLLM's CPU attention, by instruction set.

vLLM selects the instruction set in a private function and does not export the byte order. Sources:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/attention/backends/cpu_attn.py and
csrc/cpu/cpu_attn_{vec,vec16,amx}.hpp in the same repository.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from connectors.errors import UnsupportedCacheError
from connectors.planning.layout import LayerPages

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import AttentionSpec


@dataclass(frozen=True, slots=True)
class Stripes:
    """Byte order of K, or of V, of one head in one block: head size / ``dims`` stripes.

    ``dims``    elements of the head per stripe; None: the whole head is one stripe
    ``tokens``  tokens per row of a stripe; None: all tokens of the block are one row
    """

    dims: int | None
    tokens: int | None


CPU_PACKING = {
    "vec": (Stripes(1, 1), Stripes(None, 1)),
    "vec16": (Stripes(1, 1), Stripes(None, 1)),
    "amx": (Stripes(None, 16), Stripes(16, 2)),
}
"""Byte order of K and of V, by vLLM's name of the instruction set."""


_UNKNOWN = (Stripes(None, None), Stripes(None, None))
"""Of other instruction sets: each head of a block is a single row."""


def instruction_set(config: VllmConfig, block_tokens: int, head_size: int) -> str:
    """Raises NotImplementedError, as vLLM does, if the CPU rules out the FP8 cache."""
    isa: str = _get_attn_isa(config.model_config.dtype, block_tokens, head_size, config.cache_config.cache_dtype)
    return isa


def cpu_parts(config: VllmConfig, page: LayerPages, spec: AttentionSpec, size: int) -> list[LayerPages]:
    """Return the parts of a CPU attention page: per head all of K, then all of V, in stripes."""
    tokens = page.rows
    if page.row_stride_bytes != page.row_bytes:
        problem = "its heads are not contiguous in memory, but CPU attention requires contiguous heads"
        raise UnsupportedCacheError(page.layer, problem)
    isa = instruction_set(config, tokens, spec.head_size)
    parts, offset = [], 0
    for name, head_size, stripe in zip(
        "kv", (spec.head_size, spec.head_size_v), CPU_PACKING.get(isa, _UNKNOWN), strict=True
    ):
        width = head_size if stripe.dims is None else stripe.dims
        # Without tokens per row, all tokens are one row, which cannot be cut.
        granule = stripe.tokens or tokens
        stripes = head_size // width
        parts.append(
            replace(
                page,
                address=page.address + offset,
                rows=tokens // granule,
                row_bytes=granule * width * size,
                row_stride_bytes=granule * width * size,
                packing=f"cpu-attention/{isa.removesuffix('16')}/{name}/{page.packing}",
                stripes=stripes,
                stripe_stride_bytes=tokens * width * size if stripes > 1 else 0,
            )
        )
        offset += tokens * head_size * size
    return parts
