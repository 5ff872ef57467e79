"""Byte order of a block in vLLM's CPU attention, by instruction set.

vLLM selects the instruction set in a private function and does not export the byte order. Sources:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/attention/backends/cpu_attn.py and
csrc/cpu/cpu_attn_{vec,vec16,amx}.hpp in the same repository.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True, slots=True)
class Stripes:
    """Byte order of K, or of V, of one head in one block: head size / ``dims`` stripes.

    A stripe has ``dims`` elements of each of the block's tokens. Its rows can be transferred
    separately.

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
"""Byte order of K and of V, by vLLM's name of the instruction set.

tests/vllm_contract/test_cpu_packing.py checks it.
"""


def instruction_set(config: VllmConfig, block_tokens: int, head_size: int) -> str:
    """Return vLLM's name of the instruction set of a layer, for example ``vec`` or ``amx``.

    ``block_tokens``  tokens per block of the attention kernel

    Raises NotImplementedError, as vLLM does, if the CPU or ``head_size`` rules out the configured
    FP8 cache.
    """
    isa: str = _get_attn_isa(config.model_config.dtype, block_tokens, head_size, config.cache_config.cache_dtype)
    return isa


def stripes_of(isa: str) -> tuple[Stripes, Stripes]:
    """Return the byte order of K and of V.

    For an instruction set that is not in CPU_PACKING, each head of a block is a single row.
    """
    return CPU_PACKING.get(isa, (Stripes(None, None), Stripes(None, None)))
