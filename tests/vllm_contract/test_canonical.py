"""The canonical view of vLLM's caches: tables by hand, and the bytes of the references."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from vllm.v1.kv_cache_interface import KVCacheLayout

from connectors.errors import PlanError
from connectors.planning.canonical import CanonicalRef, CanonicalTensor, canonical_cache
from tests.vllm_contract.caches import full, sliding
from tests.vllm_contract.memory_engines import BLOCKS, MemoryRank, memory_rank
from tests.vllm_contract.test_packed_pages import LAYER, config, padded_rank, slotted_rank


def check_bytes(rank: MemoryRank) -> None:
    """Each reference, read from its tensor, equals the layer's view of the block, without
    padding.
    """
    rank.storage()[:] = np.random.default_rng(3).integers(0, 256, rank.storage().shape, np.uint8)
    cache = canonical_cache(rank.layout)
    for group, refs in zip(rank.cache.kv_cache_groups, cache.groups, strict=True):
        assert [ref.layer for ref in refs] == group.layer_names
        for ref in refs:
            tensor = cache.tensors[ref.tensor]
            read = ctypes.string_at(tensor.address + 7 * tensor.page_bytes + ref.offset, ref.size_bytes)
            assert read == rank.bytes_of(ref.layer)[7].tobytes()


def test_groups_of_a_hybrid_cache_share_tensors() -> None:
    """Two windows and a full layer on one tensor each: three groups refer to two tensors of 32
    KiB pages.
    """
    specs = {f"s{i}": sliding() for i in range(4)} | {f"f{i}": full() for i in range(2)}
    rank = memory_rank(config(), specs)
    cache = canonical_cache(rank.layout)
    assert [(tensor.num_blocks, tensor.page_bytes) for tensor in cache.tensors] == [(BLOCKS, 32768)] * 2
    assert [[(ref.tensor, ref.offset, ref.size_bytes) for ref in refs] for refs in cache.groups] == [
        [(0, 0, 32768), (1, 0, 32768)]
    ] * 3
    check_bytes(rank)


def test_pages_of_a_deepseek_v4_cache() -> None:
    """Blocks are outermost, so there is one tensor; pages are padded to 576 bytes, their content
    is not.
    """
    rank = padded_rank()
    cache = canonical_cache(rank.layout)
    (tensor,) = cache.tensors
    stride = next(iter(rank.views.values())).stride(0)
    assert tensor == CanonicalTensor(rank.layout.regions[0].address, BLOCKS, stride)
    refs = {ref.layer: ref for group in cache.groups for ref in group}
    assert refs["m.0.compressed"] == CanonicalRef("m.0.compressed", 0, 0, 64 * 584)
    assert refs["m.1.compressed"] == CanonicalRef("m.1.compressed", 0, 37440, 64 * 584)
    assert refs["m.0.indexer"] == CanonicalRef("m.0.indexer", 0, 2 * 37440, 64 * 132)
    assert [len(group) for group in cache.groups] == [len(g.layer_names) for g in rank.cache.kv_cache_groups]
    check_bytes(rank)


def test_heads_outside_the_blocks_are_refused() -> None:
    """A page in several ranges is refused; the error names the layer."""
    with pytest.raises(PlanError, match=f"layer '{LAYER}': its page is not contiguous within a block"):
        canonical_cache(slotted_rank(1, KVCacheLayout.LHBNC).layout)
