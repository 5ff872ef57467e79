"""Bytes between caches that vLLM's own code lays out, by transfers and through the store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.flex_attention import FlexAttentionBackend
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.kv_cache_interface import (
    KVCacheLayout,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    get_kv_quant_mode,
)

from connectors.errors import ConfigurationError, IncompatiblePeerError
from connectors.planning.descriptors import build_runs
from connectors.planning.plan import check_compatible
from connectors.store.copying import copy_runs
from connectors.store.planning.chunks import plan_store
from connectors.store.planning.layout import object_bytes, plan_rank, prove_store, store_layout
from connectors.store.planning.moves import load_moves, store_moves
from connectors.store.planning.prefix import completed_objects, needed_objects
from connectors.vllm_hma.model.kv_cache_layout import best_layout
from tests.vllm_contract.caches import HEAD_SIZE, HEADS, connector_config, full, vllm_config
from tests.vllm_contract.memory_engines import (
    MemoryRank,
    config,
    heads_of,
    memory_rank,
    plans_for,
    transfer,
    units,
    whole_blocks,
)

LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(3)]
LAYER = LAYERS[0]
DTYPES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.uint8, "int4_per_token_head": torch.uint8}
CASES = list(itertools.product(["fp8_per_token_head"], KVCacheLayout, [(1, 1), (4, 2)]))
CASES += itertools.product(["int8_per_token_head"], [KVCacheLayout.LBNHC], [(1, 2), (2, 4)])
CASES += itertools.product(["int4_per_token_head"], [KVCacheLayout.LHBNC], [(1, 2), (4, 2)])


def engine(kind: str, tp_size: int, block_size: int, layout: KVCacheLayout) -> list[MemoryRank]:
    """Return all ranks of Triton attention: scales of K and V in fp32 behind each token of each
    head.
    """
    plain = full(
        block_size=block_size,
        num_kv_heads=HEADS // tp_size,
        dtype=DTYPES[kind],
        kv_quant_mode=get_kv_quant_mode(kind),
    )
    specs = dict.fromkeys(LAYERS, TritonAttentionBackend.customize_spec(plain))
    return [memory_rank(config(tp_size, block_size), specs, layout, tp_rank=rank) for rank in range(tp_size)]


@pytest.mark.parametrize(("kind", "here", "tp_sizes"), CASES)
def test_bytes_between_any_two_layouts(kind: str, here: KVCacheLayout, tp_sizes: tuple[int, int]) -> None:
    """Two blocks of 32 tokens become one of 64, with their scales, whole or a range of layers at a
    time; nothing else changes.
    """
    producer_tp, consumer_tp = tp_sizes
    producers = engine(kind, producer_tp, 32, here)
    shape = len(LAYERS), HEADS, 64, producers[0].bytes_of(LAYER).shape[3]
    sent = dict(zip(LAYERS, np.random.default_rng(1).integers(0, 256, shape, np.uint8), strict=True))
    for rank, producer in enumerate(producers):
        for layer, content in sent.items():
            for block, tokens in zip((3, 5), np.split(heads_of(content, rank, producer_tp), 2, axis=1), strict=True):
                producer.bytes_of(layer)[block] = tokens
    for there, parts in itertools.product(KVCacheLayout, (((0, 3),), ((0, 2), (2, 3)))):
        for rank, consumer in enumerate(engine(kind, consumer_tp, 64, there)):
            consumer.storage()[:] = 0xA5
            (shape_,) = plans_for(producers, consumer)[0].shapes
            move = units(0, shape_, [(3, 0), (5, 0)], [(7, 0), (7, 1)])
            for layers in parts:
                transfer(producers, consumer, [replace(move, layers=layers)])
            for layer, content in sent.items():
                expected = np.full_like(consumer.bytes_of(layer), 0xA5)
                expected[7] = heads_of(content, rank, consumer_tp)
                assert np.array_equal(consumer.bytes_of(layer), expected), (there, parts, rank)


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


# ---- kv cache layout -----------------------------------------------------------------------------


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
    assert best_layout(backend, block_tokens, compact) == best


# ---- packed pages --------------------------------------------------------------------------------


SLOT_HEADS, HEAD_BYTES, TOKENS = 2, 128, 32
SLOT_LAYOUTS = [KVCacheLayout.LBHNC, KVCacheLayout.LHBNC, KVCacheLayout.LBNHC]


def slotted(block_size: int = TOKENS, slots: int = 2) -> KVCacheSpec:
    """Return two KV heads on this rank, in ``slots`` slots of K or V.

    With 2 slots, slots and heads are equally many.
    """
    return full(
        block_size=block_size,
        num_kv_heads=SLOT_HEADS,
        num_head_slots=slots,
        state_content_bytes=2 * SLOT_HEADS * HEAD_BYTES // slots,
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
    (pages,) = consumer.layout.groups[0].layers
    assert (pages.total_heads, pages.heads, pages.rows) == (tp_size, 1, 1), "slots are not heads"


def test_slotted_pages_are_not_cut() -> None:
    """Other block sizes, TP sizes and layouts are refused by name: as heads they would be cut
    wrongly.
    """
    here = slotted_rank(1, KVCacheLayout.LBHNC)
    with pytest.raises(IncompatiblePeerError, match=r"tokens per row.*has 32, the prefill engine 64"):
        check_compatible(slotted_rank(1, KVCacheLayout.LBHNC, 64).layout, here.layout)
    with pytest.raises(IncompatiblePeerError, match="2 head slots/slot, token/one of 2 ranks"):
        check_compatible(slotted_rank(2, KVCacheLayout.LBHNC).layout, here.layout)
    with pytest.raises(IncompatiblePeerError, match="2 head slots/token, slot/one of 1 ranks"):
        check_compatible(slotted_rank(1, KVCacheLayout.LBNHC).layout, here.layout)
    # With two heads and two slots, half a block of K would count as half a block of one head.
    short, long = (slotted_rank(2, KVCacheLayout.LBHNC, size) for size in (TOKENS, 2 * TOKENS))
    with pytest.raises(IncompatiblePeerError, match="give both engines the same block_size"):
        check_compatible(long.layout, short.layout)


def latent(
    kind: type[MLAAttentionSpec | SlidingWindowMLASpec],
    block_size: int,
    head_size: int,
    content: int | None,
    **more: Any,
) -> KVCacheSpec:
    """Return MLA's spec; with ``content`` bytes per state, DeepSeek-V4's packed FP8."""
    packed = {"cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"} if content else {}
    dtype = torch.uint8 if content or kind is MLAAttentionSpec else torch.float32
    sizes = {"block_size": block_size, "num_kv_heads": 1, "max_tp_shards": 1, "head_size": head_size}
    return kind(**sizes, dtype=dtype, state_content_bytes=content, alignment=576, **packed, **more)


def mla(block_size: int, tokens_per_state: int, head_size: int, content: int | None = None) -> KVCacheSpec:
    return latent(MLAAttentionSpec, block_size, head_size, content, tokens_per_state=tokens_per_state)


def window(block_size: int, head_size: int, tokens: int, content: int | None = None) -> KVCacheSpec:
    return latent(SlidingWindowMLASpec, block_size, head_size, content, sliding_window=tokens)


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


# ---- store ---------------------------------------------------------------------------------------


CHUNK = 256


def table(rank: MemoryRank, tokens: int) -> list[list[int]]:
    """Return blocks of one request in random order, no block in two groups."""
    free = np.random.default_rng(4).permutation(np.arange(1, rank.layout.num_blocks)).tolist()
    return [[free.pop() for _ in range(-(-tokens // group.block_tokens))] for group in rank.layout.groups]


def through_the_store(writer: MemoryRank, reader: MemoryRank, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Fill the writer at random, store ``tokens`` tokens, load them into the reader; return both
    block tables.
    """
    plan, other = (plan_store(rank.layout.groups, CHUNK, 4096) for rank in (writer, reader))
    assert prove_store(plan, [writer.layout]) == store_layout(other, reader.layout)
    writer.storage()[:] = np.random.default_rng(5).integers(0, 256, writer.storage().shape, np.uint8)
    reader.storage()[:] = 0xA5
    sizes = object_bytes(store_layout(plan, writer.layout))
    objects = {ref: np.zeros(sizes[ref.group], np.uint8) for ref in completed_objects(plan, 0, tokens)}
    addresses = {ref: payload.ctypes.data for ref, payload in objects.items()}
    source, target = table(writer, tokens), table(reader, tokens)
    store, load = plan_rank(plan, writer.layout).store, plan_rank(other, reader.layout).load
    copy_runs(build_runs(store, store_moves(plan, store, source, addresses)))
    needed = {ref: addresses[ref] for ref in needed_objects(other, 0, tokens)}
    copy_runs(build_runs(load, load_moves(other, load, target, 0, tokens, needed)))
    return source, target


def blocks(rank: MemoryRank, group: int, layer: str, ids: Sequence[int]) -> np.ndarray:
    return rank.bytes_of(layer)[np.asarray(ids, np.int64)]


def test_a_deepseek_v4_cache_in_five_groups() -> None:
    """Blocks of 256/64/64/4/8 tokens, packed and padded: each group's last window, and all of
    full attention.
    """
    writer, reader = padded_rank(), padded_rank()
    plan = plan_store(writer.layout.groups, CHUNK, 4096)
    kept = {(g.group.block_tokens, g.group.window_tokens): g.kept_tokens for g in plan.groups}
    assert kept == {(64, 128): 128, (256, None): 256, (4, 8): 8, (8, 128): 128}
    source, target = through_the_store(writer, reader, 512)
    for group, spans in enumerate(plan.groups):
        last = 512 // spans.group.block_tokens
        first = 0 if spans.group.window_tokens is None else last - spans.kept_tokens // spans.group.block_tokens
        for layer in writer.cache.kv_cache_groups[group].layer_names:
            stored = blocks(writer, group, layer, source[group][first:last])
            assert np.array_equal(stored, blocks(reader, group, layer, target[group][first:last]))
            untouched = blocks(reader, group, layer, target[group][:first])
            assert (untouched == 0xA5).all()


def test_pages_of_slots_are_stored_whole_for_engines_of_one_shape() -> None:
    """Packed blocks cannot be cut, so another block size has another namespace, and an error names
    the chunk.
    """
    short, long = (slotted_rank(1, KVCacheLayout.LBHNC, size) for size in (32, 64))
    stores = [store_layout(plan_store(rank.layout.groups, CHUNK, 4096), rank.layout) for rank in (short, long)]
    assert stores[0] != stores[1]
    through_the_store(short, slotted_rank(1, KVCacheLayout.LBHNC, 32), 256)
    with pytest.raises(ConfigurationError, match="chunk_tokens must be a multiple of 32"):
        plan_store(short.layout.groups, 48, 4096)
