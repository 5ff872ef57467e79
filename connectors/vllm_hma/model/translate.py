"""Translate vLLM's cache specs and tensors to an ``EngineLayout``: addresses, sizes and strides.

vLLM 0.32 views every attention layer's cache as (blocks, KV heads, states, content), for any
strides. Here a state is one token, and the content is K and V of one head, the latent of MLA, or a
head slot (``num_head_slots``). CPU attention packs a head's tokens differently
(``upstream/cpu_build/vllm_cpu_attention.py``). State layers have one int8 page per recurrent state
(``states.py``).

Only this module and ``states.py`` interpret the specs and tensors, so only they need a branch for a
new model family. For an unknown cache, they raise UnsupportedCacheError with layer and reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)

from connectors.errors import UnsupportedCacheError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region, unique_regions
from connectors.vllm_hma.model.drafts import model_of
from connectors.vllm_hma.model.identity import resolved_cache_dtype
from connectors.vllm_hma.model.states import state_parts

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_PLAIN_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


def engine_layout(
    config: VllmConfig, cache: KVCacheConfig, views: Mapping[str, torch.Tensor], tp_rank: int
) -> EngineLayout:
    """Return the layout of this worker's cache.

    ``views[layer]`` is an attention layer's (blocks, KV heads, states, content) tensor, or a state
    layer's (blocks, 1, 1, bytes) tensor.

    Raises UnsupportedCacheError for a layer whose bytes cannot be mapped, and as ``group_shapes``;
    PlanError if the result contradicts itself; NotImplementedError as ``instruction_set``.
    """
    tp_size = config.parallel_config.tensor_parallel_size
    groups = []
    for shape, group in zip(group_shapes(config, cache), cache.kv_cache_groups, strict=True):
        layers: list[LayerPages] = []
        for layer in group.layer_names:
            view, spec = views[layer], _layer_spec(group.kv_cache_spec, layer)
            if not isinstance(view, torch.Tensor) or view.ndim != 4:
                raise UnsupportedCacheError(layer, "its cache is not one tensor of four dimensions")
            if isinstance(spec, MambaSpec):
                layers += state_parts(config, layer, spec, view, cache.num_blocks)
            else:
                assert isinstance(spec, AttentionSpec)
                layers += _attention_parts(config, layer, spec, view, cache.num_blocks)
        groups.append(Group(shape.index, shape.kind, shape.block_tokens, shape.window_tokens, tuple(layers)))
    regions = unique_regions(_span(views[layer]) for group in cache.kv_cache_groups for layer in group.layer_names)
    caches_prefixes = bool(config.cache_config.enable_prefix_caching)
    return EngineLayout(tp_rank, tp_size, cache.num_blocks, regions, tuple(groups), caches_prefixes)


def group_shapes(config: VllmConfig, cache: KVCacheConfig) -> tuple[Group, ...]:
    """Return the cache groups without their layers, which needs no tensors: both sides refuse a
    cache before the engine accepts requests.

    Raises UnsupportedCacheError for a kind of cache or a parallel axis that is not supported, for a
    group that mixes kinds, and for one that vLLM excludes from KV transfers.
    """
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedCacheError(
                "*",
                f"{name}={getattr(parallel, name)}: the connector does not serve this grid of ranks",
                f"set {name}=1",
            )
    shapes = []
    for index, group in enumerate(cache.kv_cache_groups):
        specs = {layer: _layer_spec(group.kv_cache_spec, layer) for layer in group.layer_names}
        kinds = {(*_kind(layer, spec), spec.block_size) for layer, spec in specs.items()}
        if len(kinds) != 1:
            raise UnsupportedCacheError(
                group.layer_names[0], "its group mixes kinds of attention, window sizes or block sizes"
            )
        if not group.enable_kv_transfer or group.host_resident:
            raise UnsupportedCacheError(group.layer_names[0], "vLLM excludes its group from KV transfers")
        ((kind, window, block_tokens),) = kinds
        shapes.append(Group(index, kind, block_tokens, window, ()))
    return tuple(shapes)


def only_states_can_lag(cache: KVCacheConfig) -> bool:
    """Return whether only states can be missing from a prefix that full attention has cached.

    False without states, and with windows or several specs of full attention: vLLM evicts the
    blocks of such layers separately.
    """
    specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
    others = [spec for spec in specs if type(spec) is not MambaSpec]
    attention = (FullAttentionSpec, MLAAttentionSpec)
    return len(others) < len(specs) and all(type(spec) in attention and spec == others[0] for spec in others)


def check_stored_states(cache: KVCacheConfig) -> None:
    """Raise UnsupportedCacheError if vLLM's prefix cache has states: the KV store cannot load them.

    A prefix cache has states in several blocks of a request (``mamba_cache_mode`` "align"). If the
    request's next step ends in another block, vLLM's V1 runner copies the state there before it
    calls ``start_load_kv`` (``preprocess_mamba`` in vllm/v1/worker/gpu_model_runner.py), so the
    step would begin with what the block had before the load.
    """
    for group in cache.kv_cache_groups:
        for layer in group.layer_names:
            spec = _layer_spec(group.kv_cache_spec, layer)
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "none":
                raise UnsupportedCacheError(
                    layer,
                    "the KV store cannot load states of a model whose prefixes vLLM caches",
                    "set enable_prefix_caching to false, or remove store",
                )


def _layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _kind(layer: str, spec: KVCacheSpec) -> tuple[GroupKind, int | None]:
    # Compare exact types: a subclass (for example sink attention) has other bytes behind the same
    # fields.
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return GroupKind.FULL, None
    if isinstance(spec, SlidingWindowSpec) and type(spec) in (SlidingWindowSpec, SlidingWindowMLASpec):
        if spec.extra_retained_tokens:
            raise UnsupportedCacheError(
                layer, "the connector does not support a window that retains tokens for speculative decoding"
            )
        if getattr(spec, "bounded_replay", False):
            raise UnsupportedCacheError(layer, "the connector does not support a window that is replayed after a load")
        return GroupKind.SLIDING, spec.sliding_window
    if type(spec) is ChunkedLocalAttentionSpec:
        return GroupKind.CHUNKED, spec.attention_chunk_size
    if type(spec) is MambaSpec:
        if spec.num_speculative_blocks:
            raise UnsupportedCacheError(
                layer,
                "the connector does not support states that are copied for every speculated token",
                "remove speculative_config for this model",
            )
        return GroupKind.STATE, None
    raise UnsupportedCacheError(layer, f"the connector does not support {type(spec).__name__}")


def _attention_parts(
    config: VllmConfig, layer: str, spec: AttentionSpec, view: torch.Tensor, num_blocks: int
) -> list[LayerPages]:
    """Return an attention layer's parts: K and V where CPU attention separates them, else one.

    Raises UnsupportedCacheError if the view does not match the spec, if bytes that must be
    contiguous are not, or as ``total_heads``.
    """
    blocks, heads, rows, _ = view.shape
    kernel_blocks = blocks // num_blocks
    if blocks % num_blocks or spec.block_size % (kernel_blocks * rows):
        raise UnsupportedCacheError(
            layer,
            f"its cache has {num_blocks} blocks of {spec.block_size} tokens, but vLLM's view has {blocks} blocks of "
            f"{rows} tokens",
        )
    if heads != spec.num_heads:
        raise UnsupportedCacheError(
            layer, f"its spec has {spec.num_heads} heads or head slots, but vLLM's view has {heads}"
        )
    size = view.element_size()
    block_stride, head_stride, row_stride, content_stride = (stride * size for stride in view.stride())
    content = view.shape[3] * size
    if content_stride != size:
        raise UnsupportedCacheError(layer, "the bytes of its tokens are not contiguous")
    page = LayerPages(
        layer=layer,
        address=view.data_ptr(),
        block_stride_bytes=block_stride * kernel_blocks,
        total_heads=heads,
        heads=heads,
        # torch leaves the stride of a single head undefined; any value without overlap is valid.
        head_stride_bytes=head_stride if heads > 1 else rows * content,
        rows=rows,
        row_stride_bytes=row_stride if rows > 1 else content,
        row_bytes=content,
        packing=_packing(config, layer, spec),
        kernel_blocks=kernel_blocks,
        kernel_block_stride_bytes=block_stride if kernel_blocks > 1 else 0,
    )
    tp_size = config.parallel_config.tensor_parallel_size
    if spec.num_head_slots is not None:
        return [_slotted_page(page, tp_size)]
    if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
        return [_latent_page(page, spec)]
    page = replace(page, total_heads=total_heads(config, layer, spec), packing=f"tokens/{page.packing}")
    # CPU attention stores K, then V. A kernel with scales in the cache stores the scales behind
    # each token's data, in the token's row.
    of_cpu = view.device.type == "cpu" and spec.state_content_bytes is None
    if not of_cpu:
        return [page]
    from connectors.vllm_hma.upstream.cpu_build.vllm_cpu_attention import cpu_parts

    return cpu_parts(config, page, spec, size)


def _packing(config: VllmConfig, layer: str, spec: AttentionSpec) -> str:
    name = getattr(spec, "cache_dtype_str", None)
    resolved = resolved_cache_dtype(name, config.model_config) if name else None
    return f"{spec.dtype}/{spec.kv_quant_mode.name}/{resolved}{_scales(config, layer, spec)}"


def _scales(config: VllmConfig, layer: str, spec: AttentionSpec) -> str:
    """Return the part of the packing's name that states the layer's FP8 scales per tensor: equal
    bytes have equal values only under equal scales.

    Empty for other caches: they have no scales, or the scales in the cache, or scales per head
    (compressed-tensors' ``attn_head``), which come from the checkpoint for any TP size and belong
    to the model's identity.
    """
    scheme = getattr(config.quant_config, "kv_cache_scheme", None) or {}
    attention = config.compilation_config.static_forward_context.get(layer)
    if spec.kv_quant_mode is not KVQuantMode.FP8_PER_TENSOR or scheme.get("strategy") == "attn_head":
        return ""
    k_scale, v_scale = (getattr(attention, f"_{name}_scale_float", None) for name in "kv")
    return "" if k_scale is None or v_scale is None else f"/k_scale {k_scale:.9g}, v_scale {v_scale:.9g}"


def _slotted_page(page: LayerPages, tp_size: int) -> LayerPages:
    """Return a page of head slots, transferred whole between engines of equal TP size.

    The content of a slot depends on the kernel, and a slot is not a head. With ``num_head_slots``
    2, K of all heads is one slot and V of all heads the other (ROCm, B12X). With two slots per
    head, FlashInfer stores all of K before all of V; within each, all data precedes all scales.
    MiniMax's MSA alternates K and V.

    Raises UnsupportedCacheError unless the bytes of the page, or of each slot, are contiguous.
    """
    order = "token, slot" if page.rows > 1 and page.row_stride_bytes > page.row_bytes else "slot, token"
    packing = f"{page.heads} head slots/{order}/one of {tp_size} ranks/{page.packing}"
    whole = replace(page, total_heads=tp_size, heads=1, rows=1, packing=packing)
    axes = sorted(
        (stride, count)
        for stride, count in ((page.row_stride_bytes, page.rows), (page.head_stride_bytes, page.heads))
        if count > 1
    )
    length = page.row_bytes
    while axes and axes[0][0] == length:
        length *= axes.pop(0)[1]
    if not axes:
        return replace(whole, head_stride_bytes=length, row_bytes=length, row_stride_bytes=length)
    if axes != [(page.head_stride_bytes, page.heads)]:
        raise UnsupportedCacheError(page.layer, "the content of its head slots is not contiguous")
    # Heads outside the blocks (LHBNC): the block has one run per slot.
    return replace(
        whole,
        head_stride_bytes=page.head_stride_bytes * page.heads,
        row_bytes=length,
        row_stride_bytes=length,
        stripes=page.heads,
        stripe_stride_bytes=page.head_stride_bytes,
    )


def _latent_page(page: LayerPages, spec: MLAAttentionSpec | SlidingWindowMLASpec) -> LayerPages:
    """Return MLA's page: one latent, replicated on every rank.

    It can be cut between tokens only if each token's bytes are contiguous. Packed FP8 pages store
    the data of all tokens before all scales: DeepSeek's indexer, and ``fp8_ds_mla`` in DeepSeek-V4,
    but not in DeepSeek-V3.2.
    """
    if page.heads != 1:
        raise UnsupportedCacheError(page.layer, f"its latent has {page.heads} heads in vLLM's view, not 1")
    by_state = spec.dtype.is_floating_point or spec.cache_dtype_str in _PLAIN_FP8
    by_state |= spec.cache_dtype_str == "fp8_ds_mla" and spec.model_version is None
    if by_state and getattr(spec, "cache_role", None) is not SparseCacheRole.INDEXER:
        return replace(page, packing=f"tokens/{page.packing}")
    if page.row_stride_bytes != page.row_bytes:
        raise UnsupportedCacheError(page.layer, "the rows of its packed page are not contiguous")
    length = page.rows * page.row_bytes
    packing = f"packed states/{page.packing}"
    return replace(page, rows=1, row_bytes=length, row_stride_bytes=length, head_stride_bytes=length, packing=packing)


def total_heads(config: VllmConfig, layer: str, spec: AttentionSpec) -> int:
    """Return the number of KV heads of this layer in the whole model.

    vLLM splits heads evenly. A single head per rank is one of ``tp_size`` heads, or a replica on
    several ranks; only the model's configuration distinguishes them, and a wrong total would
    transfer wrong bytes. Raises UnsupportedCacheError if the total is unknown.
    """
    tp_size, heads = config.parallel_config.tensor_parallel_size, spec.num_kv_heads
    if tp_size == 1 or heads > 1:
        return heads * tp_size
    total = _configured_heads(config, layer, spec)
    if total is None or total > tp_size or tp_size % total:
        told = "does not state their total" if total is None else f"states {total} in total"
        raise UnsupportedCacheError(
            layer, f"it has 1 KV head on each of {tp_size} ranks, and the model's configuration {told}"
        )
    return total


def _configured_heads(config: VllmConfig, layer: str, spec: AttentionSpec) -> int | None:
    model = model_of(config, layer)
    text = model.hf_text_config
    if getattr(text, "block_configs", None):
        # Puzzle models (Nemotron-NAS) have a number of heads per block; vLLM reports the number of
        # the first block.
        return None
    architecture = model.model_arch_config
    if architecture.per_layer_overrides is not None:
        # Gemma 4: num_global_key_value_heads. EAGLE and MTP number their layers after the target's.
        numbers = [int(part) for part in layer.split(".") if part.isdecimal()]
        if len(numbers) != 1 or numbers[0] >= len(architecture.per_layer_overrides):
            return None
        architecture = architecture[numbers[0]]
    total = architecture.total_num_kv_heads
    if getattr(spec, "sliding_window", None) is not None:
        # Windows of MiMo-V2 and Inkling have a different number of KV heads.
        total = getattr(text, "swa_num_key_value_heads", None) or total
    return total if isinstance(total, int) and total > 0 else None


def _span(view: torch.Tensor) -> Region:
    last = sum((length - 1) * stride for length, stride in zip(view.shape, view.stride(), strict=True))
    memory_kind = MemoryKind("DRAM", 0) if view.device.type == "cpu" else MemoryKind("VRAM", view.device.index or 0)
    return Region(view.data_ptr(), (last + 1) * view.element_size(), memory_kind)
