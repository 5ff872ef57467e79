"""Engines whose KV cache vLLM's own code lays out, and transfers between them in memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout, KVCacheSpec
from vllm.v1.worker.utils import allocate_kv_cache

from connectors.planning.blocks import UnitShape
from connectors.planning.descriptors import Moves, build_runs
from connectors.planning.layout import EngineLayout
from connectors.planning.plan import PairPlan, check_compatible, plan_pair
from connectors.planning.verify import prove_plans
from connectors.vllm_hma.model.translate import engine_layout
from testing.memory_transport import Fabric, MemoryTransport
from tests.vllm_contract.caches import vllm_config

BLOCKS = 400
"""Number of blocks for one request of 256 tokens in every shape of these tests, as vLLM
requires.
"""

_names = itertools.count()


@dataclass
class MemoryRank:
    """One worker: its cache as vLLM views it, by layer, and as Tandem describes it."""

    cache: KVCacheConfig
    views: dict[str, torch.Tensor]
    layout: EngineLayout

    def bytes_of(self, layer: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the layer's view as (blocks, heads, states, content bytes); writes change the
        cache.
        """
        found: np.ndarray[Any, np.dtype[np.uint8]] = self.views[layer].view(torch.uint8).numpy()
        return found

    def storage(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        view = next(iter(self.views.values()))
        found: np.ndarray[Any, np.dtype[np.uint8]] = (
            torch.empty(0, dtype=torch.uint8).set_(view.untyped_storage()).numpy()
        )
        return found


@cache
def config(tp_size: int = 1, block_size: int = 32, **overrides: Any) -> VllmConfig:
    """Return the demo model's configuration for a cache of BLOCKS blocks."""
    return vllm_config.__wrapped__(
        tensor_parallel_size=tp_size,
        block_size=block_size,
        max_model_len=256,
        max_num_batched_tokens=256,
        max_num_seqs=4,
        **({"enable_prefix_caching": False} | overrides),
    )


def memory_rank(
    config: VllmConfig,
    specs: Mapping[str, KVCacheSpec],
    layout: KVCacheLayout = KVCacheLayout.LBHNC,
    tp_rank: int = 0,
    kernel_block_sizes: list[int] | None = None,
) -> MemoryRank:
    config.cache_config.kv_cache_layout = layout.name
    config.cache_config.num_gpu_blocks_override = BLOCKS
    (cache,) = get_kv_cache_configs(config, [dict(specs)], [1 << 28])
    views = allocate_kv_cache(cache, torch.device("cpu"), layout, kernel_block_sizes)
    return MemoryRank(cache, views, engine_layout(config, cache, views, tp_rank))


def plans_for(producers: Sequence[MemoryRank], consumer: MemoryRank) -> list[PairPlan]:
    """Check, plan and prove the transfers of every producer rank to one consumer rank."""
    for producer in producers:
        check_compatible(producer.layout, consumer.layout)
    plans = [plan_pair(producer.layout, consumer.layout) for producer in producers]
    prove_plans(consumer.layout, plans)
    return plans


def transfer(producers: Sequence[MemoryRank], consumer: MemoryRank, moves: Sequence[Moves]) -> None:
    plans = plans_for(producers, consumer)
    fabric = Fabric()
    receiver = MemoryTransport(f"consumer{next(_names)}", fabric)
    receiver.register(consumer.layout.regions)
    for producer, plan in zip(producers, plans, strict=True):
        sender = MemoryTransport(f"producer{next(_names)}", fabric)
        sender.register(producer.layout.regions)
        runs = build_runs(plan, moves)
        if len(runs):
            sender.add_peer(receiver.metadata())
            sender.write(receiver.name, runs, producer.layout.memory_kind, consumer.layout.memory_kind)


def heads_of(content: np.ndarray, rank: int, tp_size: int) -> np.ndarray:
    """Return a rank's share of (heads, ...)."""
    return np.split(content, tp_size)[rank]


def whole_blocks(group: int, src: int, dst: int) -> Moves:
    """Return one block that is one unit on both sides."""
    return units(group, UnitShape(0, 1, 1), [(src, 0)], [(dst, 0)])


def units(group: int, shape: UnitShape, src: list[tuple[int, int]], dst: list[tuple[int, int]]) -> Moves:
    """Return units as (block, part) on both sides."""
    assert all(part < shape.src_units for _, part in src)
    assert all(part < shape.dst_units for _, part in dst)
    src_ids, src_parts, dst_ids, dst_parts = (
        np.asarray(column, np.int64) for pairs in (src, dst) for column in zip(*pairs, strict=True)
    )
    return Moves(group, src_ids, src_parts, dst_ids, dst_parts)
