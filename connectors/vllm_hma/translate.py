"""The only reader of vLLM's cache specs and tensors: turns them into an ``EngineLayout``, once.

vLLM 0.32 views every attention layer's cache as (blocks, KV heads, tokens, content), content being K and V of one
token of one head, whatever the strides behind it. CPU attention keeps that shape and packs a head's tokens in an order
of its own (K rows, then V rows, by instruction set): its heads move whole, and only between equal packings.

A new model family is a new branch here, and nowhere else. What is not known is refused, by layer and spec.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import vllm
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec, UniformTypeKVCacheSpecs

from connectors.errors import UnsupportedCacheError
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, Place, Region, unique_regions
from connectors.protocol.cards import ModelIdentity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_SAMPLE_BYTES, _SAMPLES = 1 << 18, 16
_SEPARATE = "serve this model without Tandem's connector"


def engine_layout(
    config: VllmConfig, cache: KVCacheConfig, views: Mapping[str, torch.Tensor], tp_rank: int
) -> EngineLayout:
    """This worker's cache. ``views[layer]`` has shape (blocks, KV heads, tokens, content).

    Raises UnsupportedCacheError for a layer whose bytes cannot be mapped.
    """
    check_groups(config, cache)
    heads = config.model_config.get_total_num_kv_heads()
    tp_size = config.parallel_config.tensor_parallel_size
    groups = []
    for index, group in enumerate(cache.kv_cache_groups):
        specs = [_layer_spec(group.kv_cache_spec, layer) for layer in group.layer_names]
        layers = tuple(
            _layer_pages(config, layer, spec, views[layer], cache.num_blocks, heads, tp_size)
            for layer, spec in zip(group.layer_names, specs, strict=True)
        )
        kind, window = _kind(group.layer_names[0], specs[0])
        groups.append(Group(index, kind, specs[0].block_size, window, layers))
    regions = unique_regions(_span(views[layer]) for group in cache.kv_cache_groups for layer in group.layer_names)
    return EngineLayout(tp_rank, tp_size, cache.num_blocks, regions, tuple(groups))


def group_shapes(config: VllmConfig, cache: KVCacheConfig) -> tuple[Group, ...]:
    """The groups without their layers: what the scheduler, which has no tensors, needs to know."""
    check_groups(config, cache)
    shapes = []
    for index, group in enumerate(cache.kv_cache_groups):
        spec = _layer_spec(group.kv_cache_spec, group.layer_names[0])
        kind, window = _kind(group.layer_names[0], spec)
        shapes.append(Group(index, kind, spec.block_size, window, ()))
    return tuple(shapes)


def check_groups(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Refuse what the connector cannot carry, before the engine accepts a request."""
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise UnsupportedCacheError("*", f"{name}={getattr(parallel, name)} splits a layer's KV", f"set {name}=1")
    for group in cache.kv_cache_groups:
        specs = {layer: _layer_spec(group.kv_cache_spec, layer) for layer in group.layer_names}
        kinds = {(*_kind(layer, spec), spec.block_size) for layer, spec in specs.items()}
        if len(kinds) != 1:
            raise UnsupportedCacheError(group.layer_names[0], "its group mixes kinds of attention", _SEPARATE)
        if not group.enable_kv_transfer or group.host_resident:
            raise UnsupportedCacheError(group.layer_names[0], "its group is kept out of KV transfers", _SEPARATE)


def model_identity(config: VllmConfig) -> ModelIdentity:
    """What must be equal on both engines. Cheap: reads at most 4 MiB of each weight file."""
    model = config.model_config
    digest = hashlib.blake2b(digest_size=16)
    path = Path(model.model)
    if path.is_dir():
        for file in sorted([*path.glob("*.safetensors"), *path.glob("*.bin")]):
            digest.update(f"{file.name}:{file.stat().st_size}:".encode())
            digest.update(_sample(file))
    else:
        digest.update(f"{model.model}@{model.revision}:".encode())
    # As loaded, so that hf_overrides and the like count.
    effective = {key: value for key, value in model.hf_config.to_dict().items() if key != "_name_or_path"}
    effective["tandem"] = [str(model.quantization), config.load_config.load_format == "dummy"]
    digest.update(json.dumps(effective, sort_keys=True, default=str).encode())
    return ModelIdentity(
        model=digest.hexdigest(),
        dtype=str(model.dtype),
        cache_dtype=str(config.cache_config.cache_dtype),
        engine_version=vllm.__version__,
    )


def _sample(file: Path) -> bytes:
    """Pieces from the first byte, a safetensors header with all names and shapes, to the last."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        pieces = []
        for number in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
            pieces.append(stream.read(_SAMPLE_BYTES))
    return b"".join(pieces)


def _layer_spec(spec: KVCacheSpec, layer: str) -> KVCacheSpec:
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def _kind(layer: str, spec: KVCacheSpec) -> tuple[GroupKind, int | None]:
    # Exact types: a subclass (MLA, sink attention) keeps other bytes behind the same fields.
    if type(spec) is FullAttentionSpec:
        return GroupKind.FULL, None
    if type(spec) is SlidingWindowSpec:
        if spec.extra_retained_tokens:
            raise UnsupportedCacheError(layer, "its window retains tokens for speculative decoding", _SEPARATE)
        return GroupKind.SLIDING, spec.sliding_window
    raise UnsupportedCacheError(layer, f"the connector does not know how {type(spec).__name__} keeps KV", _SEPARATE)


def _layer_pages(
    config: VllmConfig,
    layer: str,
    spec: KVCacheSpec,
    view: torch.Tensor,
    num_blocks: int,
    kv_heads: int,
    tp_size: int,
) -> LayerPages:
    assert isinstance(spec, FullAttentionSpec | SlidingWindowSpec)
    if not isinstance(view, torch.Tensor) or view.ndim != 4:
        raise UnsupportedCacheError(layer, "its cache is not one tensor of (blocks, heads, tokens, content)", _SEPARATE)
    blocks, heads, tokens, _ = view.shape
    if (blocks, tokens) != (num_blocks, spec.block_size):
        raise UnsupportedCacheError(
            layer,
            f"the kernel splits {num_blocks} blocks of {spec.block_size} tokens into {blocks} of {tokens}",
            f"set block_size={tokens}",
        )
    if heads != max(1, kv_heads // tp_size) or (kv_heads >= tp_size and kv_heads % tp_size):
        raise UnsupportedCacheError(
            layer, f"it keeps {heads} KV heads on this rank, {kv_heads} heads over {tp_size} ranks", _SEPARATE
        )
    size = view.element_size()
    block_stride, head_stride, token_stride, content_stride = (stride * size for stride in view.stride())
    content = view.shape[3] * size
    if content_stride != size:
        raise UnsupportedCacheError(layer, "the content of its tokens is not contiguous", _SEPARATE)
    if view.device.type == "cpu":
        if token_stride != content:
            raise UnsupportedCacheError(layer, "its heads are not contiguous, which CPU attention needs", _SEPARATE)
        isa = _get_attn_isa(config.model_config.dtype, spec.block_size, spec.head_size, config.cache_config.cache_dtype)
        rows, row_stride, row_bytes, packing = 1, tokens * content, tokens * content, f"cpu-attention/{isa}"
    else:
        rows, row_stride, row_bytes, packing = tokens, token_stride, content, "tokens"
    # A single head or block leaves its stride undefined in torch; any value that does not overlap will do.
    return LayerPages(
        layer=layer,
        address=view.data_ptr(),
        block_stride_bytes=block_stride,
        total_heads=kv_heads,
        heads=heads,
        head_stride_bytes=head_stride if heads > 1 else rows * row_bytes,
        rows=rows,
        row_stride_bytes=row_stride,
        row_bytes=row_bytes,
        packing=f"{packing}/{spec.dtype}/{spec.kv_quant_mode.name}",
    )


def _span(view: torch.Tensor) -> Region:
    """The memory from a view's first to its last byte."""
    last = sum((length - 1) * stride for length, stride in zip(view.shape, view.stride(), strict=True))
    place = Place("DRAM", 0) if view.device.type == "cpu" else Place("VRAM", view.device.index or 0)
    return Region(view.data_ptr(), (last + 1) * view.element_size(), place)
