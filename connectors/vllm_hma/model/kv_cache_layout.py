"""Choose the KV cache layout in which a transfer needs the fewest runs.

Posting a run costs the same whatever its size (docs/benchmarks.md). With layers inside the block,
one run carries all layers of a block: in ``BHLNC`` also between unequal TP sizes, because a range
of heads is one piece; in ``BLHNC`` between equal ones. In ``LBHNC``, each layer has its own runs.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.selector import get_attn_backend

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import AttentionBackend

logger = logging.getLogger(__name__)


def requested_layout(config: VllmConfig) -> str | None:
    """Return the layout to request from vLLM; None for no preference.

    ``VLLM_KV_CACHE_LAYOUT`` takes precedence. If another backend of the model does not support it,
    vLLM uses its own first choice (``resolve_kv_cache_layout`` in
    vllm/v1/attention/backends/utils.py).
    """
    model = config.model_config
    if model is None:
        return None
    layer_outermost = None if model.use_mla else "LBHNC"  # MLA has one head: all are equal
    if current_platform.is_cpu():  # CPU attention reads LBHNC only
        return layer_outermost
    try:
        with set_current_vllm_config(config):
            backend = get_attn_backend(
                model.get_head_size(), model.dtype, config.cache_config.cache_dtype, use_mla=model.use_mla
            )
            best = best_layout(backend, config.cache_config.block_size, _mixed_pages(config))
    except Exception as error:  # a preference must not end the engine: vLLM selects with more arguments
        logger.warning(
            "Tandem: requests layout %s, as no attention backend was found (VLLM_KV_CACHE_LAYOUT overrides it): %s",
            layer_outermost,
            error,
        )
        return layer_outermost
    return best or layer_outermost


def _mixed_pages(config: VllmConfig) -> bool:
    """Return whether layers may differ in heads, head size or kind of cache: vLLM then accepts
    block-compact layouts only. Attributes as in ``translate.total_heads``: MiMo-V2, Inkling, Step,
    Puzzle.
    """
    model = config.model_config
    names = ("swa_num_key_value_heads", "swa_head_dim", "attention_other_setting", "block_configs")
    return (
        model.use_mla
        or model.is_hybrid
        or config.speculative_config is not None
        or model.model_arch_config.per_layer_overrides is not None
        or any(getattr(model.hf_text_config, name, None) for name in names)
    )


def best_layout(backend: type[AttentionBackend], block_tokens: int, compact: bool) -> str | None:
    """Return the best layout with layers inside the block; None if the backend reads none.

    ``compact``  whether each layer's part of a block must be contiguous

    vLLM does not divide the blocks of such a layout into kernel blocks
    (``prepare_kernel_block_sizes`` in vllm/v1/worker/utils.py), so the kernel must take whole ones.
    """
    sizes = backend.get_supported_kernel_block_sizes()
    if not any(
        block_tokens % size.base == 0 if isinstance(size, MultipleOf) else block_tokens == size for size in sizes
    ):
        return None
    supported = backend.supported_kv_cache_layouts()
    names = None if supported is None else {layout.name for layout in supported}
    wanted = ("BLHNC",) if compact else ("BHLNC", "BLHNC")
    return next((name for name in wanted if names is None or name in names), None)
