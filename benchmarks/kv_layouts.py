"""Runs of one transfer in vLLM's KV cache layouts, for four models.

vLLM's own code lays the caches out, without memory (torch's ``meta`` device). Counts are those of
the producer rank with most runs. In a fresh pool, blocks are consecutive; in a fragmented one, they
are a random permutation.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheLayout,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker.utils import allocate_kv_cache

from app.demo.paths import MODEL_DIR
from benchmarks.report import write
from connectors.planning.blocks import NULL_BLOCK, wanted_blocks
from connectors.planning.descriptors import Moves, build_runs
from connectors.planning.layout import EngineLayout
from connectors.planning.plan import check_compatible, plan_pair
from connectors.planning.verify import prove_plans
from connectors.vllm_hma.model.translate import engine_layout

MODELS = ("Qwen3-8B", "Llama-70B", "gpt-oss-120b", "DeepSeek-V3")
TP_PAIRS = ((1, 1), (2, 4), (4, 2))
BLOCKS = 2**15


def specs_of(model: str, tp_size: int, block_tokens: int) -> dict[str, KVCacheSpec]:
    """Return the cache specs of a model's layers on one rank."""
    plain: dict[str, Any] = {"block_size": block_tokens, "dtype": torch.bfloat16}
    heads = {"num_kv_heads": 8 // tp_size}
    match model:
        case "Qwen3-8B":
            kinds: list[KVCacheSpec] = [FullAttentionSpec(**plain, **heads, head_size=128)] * 36
        case "Llama-70B":
            kinds = [FullAttentionSpec(**plain, **heads, head_size=128)] * 80
        case "gpt-oss-120b":
            window = SlidingWindowSpec(**plain, **heads, head_size=64, sliding_window=128)
            kinds = [window, FullAttentionSpec(**plain, **heads, head_size=64)] * 18
        case _:
            kinds = [MLAAttentionSpec(**plain, num_kv_heads=1, head_size=576)] * 61
    return {f"model.layers.{index}.self_attn.attn": kind for index, kind in enumerate(kinds)}


@cache
def _config(tp_size: int, block_tokens: int) -> VllmConfig:
    return EngineArgs(
        model=str(MODEL_DIR), tensor_parallel_size=tp_size, block_size=block_tokens, enforce_eager=True
    ).create_engine_config()


def ranks_of(model: str, tp_size: int, block_tokens: int, layout: KVCacheLayout) -> list[EngineLayout]:
    """Return the cache of each rank of an engine, as vLLM lays it out."""
    config, specs = _config(tp_size, block_tokens), specs_of(model, tp_size, block_tokens)
    config.cache_config.kv_cache_layout, config.cache_config.num_gpu_blocks_override = layout.name, BLOCKS
    (cached,) = get_kv_cache_configs(config, [dict(specs)], [2**45])
    views: Mapping[str, torch.Tensor] = allocate_kv_cache(cached, torch.device("meta"), layout)
    return [engine_layout(config, cached, views, rank) for rank in range(tp_size)]


def moves_between(producer: EngineLayout, consumer: EngineLayout, tokens: int, fresh: bool) -> list[Moves]:
    """Return a prompt's blocks, of equal size on both sides."""
    rng, moves, first = np.random.default_rng(1), [], 1
    for group, theirs in zip(producer.groups, consumer.groups, strict=True):
        count = -(-tokens // group.block_tokens)
        src, dst = (
            np.arange(first, first + count) if fresh else first + rng.permutation(2 * count)[:count] for _ in range(2)
        )
        first += count if fresh else 2 * count
        wanted = wanted_blocks(theirs, dst.tolist(), 0, tokens)
        parts = np.full(len(wanted), NULL_BLOCK)
        moves.append(Moves(group.index, src[wanted.positions], parts, wanted.ids, parts))
    return moves


def count_runs(
    model: str, tp_pair: tuple[int, int], block_tokens: int, layout: KVCacheLayout, tokens: int, fresh: bool
) -> int:
    """Return the number of runs that the busiest producer rank posts to one consumer rank."""
    producers, consumers = (ranks_of(model, size, block_tokens, layout) for size in tp_pair)
    moves = moves_between(producers[0], consumers[0], tokens, fresh)
    most = 0
    for consumer in consumers:
        check_compatible(producers[0], consumer)
        plans = [plan_pair(producer, consumer) for producer in producers]
        prove_plans(consumer, plans)
        most = max(most, *(len(build_runs(plan, moves)) for plan in plans))
    return most


def main(*, tokens: int = 16000) -> None:
    rows = []
    print("model          TP      block  pool            LBHNC    BLHNC    BHLNC")
    for model, tp_pair, block_tokens, fresh in product(MODELS, TP_PAIRS, (16, 128), (True, False)):
        counts = {
            layout.name: count_runs(model, tp_pair, block_tokens, layout, tokens, fresh)
            for layout in (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)
        }
        pool = "fresh" if fresh else "fragmented"
        rows.append({"model": model, "tp": tp_pair, "block_tokens": block_tokens, "pool": pool} | counts)
        cells = "  ".join(f"{count:7,}" for count in counts.values())
        print(f"{model:13}  {tp_pair[0]} -> {tp_pair[1]}  {block_tokens:5}  {pool:12}  {cells}", flush=True)
    write("kv_layouts", {"tokens": tokens, "rows": rows})
