"""KV cache layouts: the one that the connector requests, and transfers between any two of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import KVCacheLayout

from connectors.vllm_hma.model.kv_cache_layout import best_layout
from tests.vllm_contract.caches import HEADS, connector_config, vllm_config
from tests.vllm_contract.memory_engines import MemoryRank, config, memory_rank, transfer, whole_blocks
from tests.vllm_contract.test_quantized_caches import spec

ANY = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]
"""vLLM's order of preference for backends without one (vllm/v1/attention/backends/utils.py)."""


def test_the_requested_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's default is token-major: with unequal TP sizes each token's share of heads would be a
    separate run. A backend that knows one layout keeps it; CPU attention is always head-major. MLA
    has one head, so its pages are equal in both layouts.
    """
    cpu = [layout.name for layout in CPUAttentionBackend.supported_kv_cache_layouts()]
    assert cpu == ["LBHNC"]

    def resolved(known: list[str], mla: bool = False) -> str:
        made: VllmConfig = vllm_config.__wrapped__(kv_transfer_config=connector_config())
        with monkeypatch.context() as patch:
            if mla:
                patch.setattr(type(made.model_config), "use_mla", True)
            return str(resolve_kv_cache_layout(made, [known]).name)

    assert [resolved(ANY), resolved(cpu), resolved(["LBNHC"])] == ["LBHNC", "LBHNC", "LBNHC"]
    assert resolved(ANY, mla=True) == "LBNHC"


@pytest.mark.parametrize(
    ("backend", "block_tokens", "compact", "best"),
    [
        (TritonAttentionBackend, 128, False, "BHLNC"),
        (TritonAttentionBackend, 128, True, "BLHNC"),
        (TritonAttentionBackend, 24, False, None),  # the kernel takes multiples of 16 tokens
        (FlashAttentionBackend, 128, False, "BHLNC"),
        (DeepseekV4IndexerBackend, 256, True, "BLHNC"),
        (DeepseekV4IndexerBackend, 64, True, None),
        (FlexAttentionBackend, 128, False, None),
        (CPUAttentionBackend, 128, False, None),
    ],
)
def test_the_best_layout_of_a_backend(
    backend: type[AttentionBackend], block_tokens: int, compact: bool, best: str | None
) -> None:
    """Layers lie inside the block where the backend's kernels read that and take whole blocks."""
    assert best_layout(backend, block_tokens, compact) == best


LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(3)]


def ranks(tp_size: int, layout: KVCacheLayout) -> list[MemoryRank]:
    specs = {layer: spec("fp8_per_token_head", tp_size, 32) for layer in LAYERS}
    return [memory_rank(config(tp_size), specs, layout, tp_rank=rank) for rank in range(tp_size)]


@pytest.mark.parametrize("producer_layout", KVCacheLayout)
@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (1, 2), (4, 2)])
def test_bytes_between_any_two_layouts(producer_layout: KVCacheLayout, producer_tp: int, consumer_tp: int) -> None:
    """Blocks 3 and 4 become 7 and 8, whole or a range of layers at a time; nothing else changes."""
    producers = ranks(producer_tp, producer_layout)
    content = producers[0].bytes_of(LAYERS[0]).shape[3]
    sent = np.random.default_rng(1).integers(0, 256, (len(LAYERS), 2, HEADS, 32, content), np.uint8)
    for rank, producer in enumerate(producers):
        first, count = rank * HEADS // producer_tp, HEADS // producer_tp
        for layer, blocks in zip(LAYERS, sent, strict=True):
            producer.bytes_of(layer)[3:5] = blocks[:, first : first + count]
    for consumer_layout, parts in itertools.product(KVCacheLayout, (((0, 3),), ((0, 2), (2, 3)))):
        for rank, consumer in enumerate(ranks(consumer_tp, consumer_layout)):
            consumer.storage()[:] = 0xA5
            for layers in parts:
                transfer(
                    producers, consumer, [replace(whole_blocks(0, a, b), layers=layers) for a, b in ((3, 7), (4, 8))]
                )
            first, count = rank * HEADS // consumer_tp, HEADS // consumer_tp
            for layer, blocks in zip(LAYERS, sent, strict=True):
                expected = np.full_like(consumer.bytes_of(layer), 0xA5)
                expected[7:9] = blocks[:, first : first + count]
                assert np.array_equal(consumer.bytes_of(layer), expected), (consumer_layout, parts, rank)
