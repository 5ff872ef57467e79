"""The store on caches laid out by vLLM: one engine stores, another with other blocks loads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.kv_cache_interface import KVCacheLayout

from connectors.planning.descriptors import build_runs
from connectors.store.copying import copy_runs
from connectors.store.planning.layout import object_bytes, plan_rank, prove_store, store_layout
from connectors.store.planning.moves import load_moves, store_moves
from connectors.store.planning.prefix import completed_objects, needed_objects
from connectors.store.planning.spans import plan_store
from tests.vllm_contract.memory_engines import MemoryRank
from tests.vllm_contract.test_packed_pages import padded_rank, slotted_rank

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
    """Return the content of some blocks of a layer: (blocks, heads, states, bytes)."""
    return rank.bytes_of(layer)[np.asarray(ids, np.int64)]


def test_a_deepseek_v4_cache_in_five_groups() -> None:
    """Blocks of 256/64/64/4/8 tokens, packed and padded: each group's last window, and all of
    full attention.
    """
    writer, reader = padded_rank(), padded_rank()
    plan = plan_store(writer.layout.groups, CHUNK, 4096)
    assert plan.warnings == ()
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
    """Packed blocks cannot be cut, so another block size has another namespace; a warning names
    the chunk.
    """
    short, long = (slotted_rank(1, KVCacheLayout.LBHNC, size) for size in (32, 64))
    stores = [store_layout(plan_store(rank.layout.groups, CHUNK, 4096), rank.layout) for rank in (short, long)]
    assert stores[0] != stores[1]
    through_the_store(short, slotted_rank(1, KVCacheLayout.LBHNC, 32), 256)
    plan = plan_store(short.layout.groups, 48, 4096)
    assert [spans.span_tokens for spans in plan.groups] == [64]
    assert "its objects have 64 tokens" in plan.warnings[0]
