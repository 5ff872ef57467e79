"""Quantized caches: scales in the cache move with their tokens, others must be equal on both sides.

vLLM's CPU build runs FP8 with one scale per layer only. The layouts with scales per token and head
are those of vLLM's Triton attention, on tensors.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, get_kv_quant_mode

from connectors.errors import IncompatiblePeerError
from connectors.planning.plan import check_compatible
from tests.vllm_contract.caches import HEAD_SIZE, HEADS, full, vllm_config
from tests.vllm_contract.memory_engines import MemoryRank, config, memory_rank, plans_for, transfer, units

LAYER = "model.layers.0.self_attn.attn"
DTYPES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.uint8, "int4_per_token_head": torch.uint8}
LAYOUTS = [KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.LBNHC]


def spec(kind: str, tp_size: int, block_size: int) -> FullAttentionSpec:
    """Return Triton attention's spec: scales of K and V in fp32 behind each token of each head."""
    plain = full(
        block_size=block_size,
        num_kv_heads=max(1, HEADS // tp_size),
        dtype=DTYPES[kind],
        kv_quant_mode=get_kv_quant_mode(kind),
    )
    found = TritonAttentionBackend.customize_spec(plain)
    assert isinstance(found, FullAttentionSpec)
    return found


def engine(kind: str, tp_size: int, block_size: int, layout: KVCacheLayout) -> list[MemoryRank]:
    specs = {LAYER: spec(kind, tp_size, block_size)}
    return [memory_rank(config(tp_size, block_size), specs, layout, tp_rank=rank) for rank in range(tp_size)]


@pytest.mark.parametrize("kind", DTYPES)
def test_a_row_is_a_token_with_its_scales(kind: str) -> None:
    """K and V of 32 dimensions and two scales of 4 bytes; INT4 stores two dimensions per byte."""
    (pages,) = engine(kind, 2, 32, KVCacheLayout.LBHNC)[0].layout.groups[0].layers
    assert (pages.total_heads, pages.heads, pages.rows) == (HEADS, 2, 32)
    assert pages.row_bytes == (HEAD_SIZE if kind.startswith("int4") else 2 * HEAD_SIZE) + 8


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 2), (4, 2), (2, 4)])
def test_scales_move_with_their_heads(kind: str, producer_tp: int, consumer_tp: int) -> None:
    """Two blocks of 32 tokens become one of 64, in another order of dimensions."""
    for here, there in zip(LAYOUTS, LAYOUTS[1:] + LAYOUTS[:1], strict=True):
        producers, consumers = engine(kind, producer_tp, 32, here), engine(kind, consumer_tp, 64, there)
        content = producers[0].bytes_of(LAYER).shape[3]
        tokens = np.random.default_rng(1).integers(0, 256, (HEADS, 64, content), np.uint8)
        for rank, producer in enumerate(producers):
            held = max(1, HEADS // producer_tp)
            first = rank * HEADS // producer_tp
            for number, block in enumerate((3, 5)):
                cut = tokens[first : first + held, 32 * number : 32 * (number + 1)]
                producer.bytes_of(LAYER)[block] = cut
        for rank, consumer in enumerate(consumers):
            consumer.storage()[:] = 0xA5
            (shape,) = plans_for(producers, consumer)[0].shapes
            transfer(producers, consumer, [units(0, shape, [(3, 0), (5, 0)], [(7, 0), (7, 1)])])
            first = rank * HEADS // consumer_tp
            expected = np.full_like(consumer.bytes_of(LAYER), 0xA5)
            expected[7] = tokens[first : first + max(1, HEADS // consumer_tp)]
            assert np.array_equal(consumer.bytes_of(LAYER), expected), (here, there, rank)


def fp8_rank(k_scale: float, v_scale: float, tp_rank: int = 0) -> MemoryRank:
    """A rank of two with one of vLLM's attention layers, whose scales have been loaded."""
    made = vllm_config.__wrapped__(
        tensor_parallel_size=2, dtype="bfloat16", kv_cache_dtype="fp8", max_model_len=256, max_num_seqs=4
    )
    with set_current_vllm_config(made):
        layer = Attention(HEADS, HEAD_SIZE, 1.0, HEADS // 2, cache_config=made.cache_config, prefix=LAYER)
    layer._k_scale_float, layer._v_scale_float = k_scale, v_scale  # noqa: SLF001 - where vLLM keeps them
    return memory_rank(made, {LAYER: layer.get_kv_cache_spec(made)}, tp_rank=tp_rank)


def test_other_scales_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines, or ranks of one engine, with other FP8 scales do not exchange bytes.

    No kernel runs here, so the CPU needs no AVX-512.
    """
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: True)
    ours = fp8_rank(0.5, 0.25).layout
    check_compatible(fp8_rank(0.5, 0.25, tp_rank=1).layout, ours)
    for other in (fp8_rank(0.5, 0.125).layout, fp8_rank(1.0, 0.25, tp_rank=1).layout):
        with pytest.raises(IncompatiblePeerError, match=r"packing of layer .*k_scale 0.5, v_scale 0.25"):
            check_compatible(other, ours)
