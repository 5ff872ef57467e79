"""Pages that only a kernel can cut: head slots, packed MLA states, and DeepSeek-V4's groups."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec, MLAAttentionSpec, SlidingWindowMLASpec

from connectors.errors import IncompatiblePeerError
from connectors.planning.blocks import UnitShape
from connectors.planning.plan import check_compatible
from tests.vllm_contract.caches import full
from tests.vllm_contract.memory_engines import MemoryRank, config, memory_rank, plans_for, transfer, units, whole_blocks

HEADS, HEAD_BYTES, TOKENS = 2, 128, 32
LAYER = "model.layers.0.self_attn.attn"
SLOT_LAYOUTS = [KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.LBNHC]


def slotted(block_size: int = TOKENS, slots: int = 2) -> KVCacheSpec:
    """Return two KV heads on this rank, in ``slots`` slots of K or V.

    With 2 slots, slots and heads are equally many.
    """
    return full(
        block_size=block_size,
        num_kv_heads=HEADS,
        num_head_slots=slots,
        state_content_bytes=2 * HEADS * HEAD_BYTES // slots,
    )


def slotted_rank(tp_size: int, layout: KVCacheLayout, block_size: int = TOKENS, slots: int = 2) -> MemoryRank:
    return memory_rank(config(tp_size, block_size), {LAYER: slotted(block_size, slots)}, layout)


@pytest.mark.parametrize("slots", [2, 4])
@pytest.mark.parametrize("layout", SLOT_LAYOUTS)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_slotted_page_moves_whole(tp_size: int, layout: KVCacheLayout, slots: int) -> None:
    """K and V of all heads, in two slots or two per head: byte for byte between ranks of one TP
    size.
    """
    producer, consumer, expected = (slotted_rank(tp_size, layout, slots=slots) for _ in range(3))
    producer.storage()[:] = np.random.default_rng(1).integers(0, 256, producer.storage().shape, np.uint8)
    for rank in (consumer, expected):
        rank.storage()[:] = 0xA5
    expected.bytes_of(LAYER)[7] = producer.bytes_of(LAYER)[3]
    # Ranks are paired by number, and this is rank 0 of both.
    transfer([producer], consumer, [whole_blocks(0, 3, 7)])
    assert np.array_equal(consumer.storage(), expected.storage())


def test_slots_are_not_heads() -> None:
    """2 slots of 32 tokens of 256 bytes are one run of 16 KiB, or two of 8 KiB with slots
    outside blocks.
    """
    (pages,) = slotted_rank(1, KVCacheLayout.LBHNC).layout.groups[0].layers
    assert (pages.total_heads, pages.heads, pages.rows, pages.row_bytes, pages.stripes) == (1, 1, 1, 16384, 1)
    (pages,) = slotted_rank(1, KVCacheLayout.LHBNC).layout.groups[0].layers
    assert (pages.total_heads, pages.heads, pages.rows, pages.row_bytes, pages.stripes) == (1, 1, 1, 8192, 2)
    assert pages.stripe_stride_bytes == 400 * 8192


def test_slotted_pages_are_not_cut() -> None:
    """Other block sizes, TP sizes and layouts are refused by name: as heads they would be cut
    wrongly.
    """
    here = slotted_rank(1, KVCacheLayout.LBHNC)
    with pytest.raises(IncompatiblePeerError, match=r"tokens per row.*block sizes are 32 and 64"):
        check_compatible(slotted_rank(1, KVCacheLayout.LBHNC, 64).layout, here.layout)
    with pytest.raises(IncompatiblePeerError, match="2 head slots/slot, token/one of 2 ranks"):
        check_compatible(slotted_rank(2, KVCacheLayout.LBHNC).layout, here.layout)
    with pytest.raises(IncompatiblePeerError, match="2 head slots/token, slot/one of 1 ranks"):
        check_compatible(slotted_rank(1, KVCacheLayout.LBNHC).layout, here.layout)
    # With two heads and two slots, half a block of K would count as half a block of one head.
    short, long = (slotted_rank(2, KVCacheLayout.LBHNC, size) for size in (TOKENS, 2 * TOKENS))
    with pytest.raises(IncompatiblePeerError, match="give both engines the same block_size"):
        check_compatible(long.layout, short.layout)


def mla(block_size: int, tokens_per_state: int, head_size: int, content: int | None = None) -> MLAAttentionSpec:
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=head_size,
        dtype=torch.uint8,
        tokens_per_state=tokens_per_state,
        cache_dtype_str="fp8_ds_mla" if content else None,
        model_version="deepseek_v4" if content else None,
        state_content_bytes=content,
        alignment=576,
    )


def window(block_size: int, head_size: int, tokens: int, content: int | None = None) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(
        block_size=block_size,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=head_size,
        dtype=torch.uint8 if content else torch.float32,
        sliding_window=tokens,
        cache_dtype_str="fp8_ds_mla" if content else None,
        model_version="deepseek_v4" if content else None,
        state_content_bytes=content,
        alignment=576,
    )


def deepseek_v4_specs() -> dict[str, KVCacheSpec]:
    """Return the specs of vllm/models/deepseek_v4: block sizes 256, 64, 64, 4 and 8, two with one
    spec; pages are padded.

    Compressed KV and its indexer, two sliding windows, and the compressors' states for ratios of 4
    and 128.
    """
    found: dict[str, KVCacheSpec] = {}
    for layer in range(4):
        found[f"m.{layer}.window"] = window(64, 512, 128, 584)
    for layer in range(2):
        found[f"m.{layer}.compressed"] = mla(256, 4, 512, 584)
        found[f"m.{layer}.indexer"] = mla(256, 4, 132)
        found[f"m.{layer}.state4"] = window(4, 1024, 8)
        found[f"m.{layer}.state8"] = window(8, 512, 128)
    return found


def padded_rank() -> MemoryRank:
    """One group per kind of page, and another group of the windows' spec."""
    return memory_rank(config(block_size=256), deepseek_v4_specs(), KVCacheLayout.BLNHC)


def test_every_byte_of_a_deepseek_v4_cache() -> None:
    """All groups of one transfer, with their own blocks; padding between the pages stays
    unchanged.
    """
    producer, consumer, expected = (padded_rank() for _ in range(3))
    groups = [(group.layer_names, consumer.layout.groups[i]) for i, group in enumerate(consumer.cache.kv_cache_groups)]
    assert sorted(group.block_tokens for _, group in groups) == [4, 8, 64, 64, 256]
    producer.storage()[:] = np.random.default_rng(2).integers(0, 256, producer.storage().shape, np.uint8)
    for rank in (consumer, expected):
        rank.storage()[:] = 0xA5
    moves = []
    for number, (layers, group) in enumerate(groups):
        src, dst = 10 + number, 50 + number
        for layer in layers:
            expected.bytes_of(layer)[dst] = producer.bytes_of(layer)[src]
        (plan,) = plans_for([producer], consumer)
        shape = plan.groups[group.index].shape
        assert shape == UnitShape(group.block_tokens, 1, 1)
        moves.append(units(group.index, shape, [(src, 0)], [(dst, 0)]))
    transfer([producer], consumer, moves)
    assert np.array_equal(consumer.storage(), expected.storage())
    (padded,) = {
        (view.stride(0), view.shape[2] * view.shape[3])
        for layer, view in consumer.views.items()
        if layer.endswith("window")
    }
    assert padded[1] == 64 * 584 < 37440 < padded[0], "a page is padded to a multiple of 576 bytes"


def test_packed_states_are_not_cut() -> None:
    """The indexer stores all values of a block before all scales, so half a block is not one
    run.
    """
    ours, theirs = (
        memory_rank(config(block_size=size), {"m.0.indexer": mla(size, 1, 132)}, KVCacheLayout.LBHNC)
        for size in (64, 128)
    )
    with pytest.raises(IncompatiblePeerError, match=r"tokens per row of layer 'm\.0.indexer'"):
        check_compatible(theirs.layout, ours.layout)
