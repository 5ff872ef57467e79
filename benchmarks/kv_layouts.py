"""Runs and planning time of one transfer in vLLM's token-major and head-major KV cache layouts.

    python -m benchmarks.kv_layouts [--layers 64] [--kv-heads 8] [--tokens 32768]
        [--block-tokens 16] [--rounds 5]

One producer rank sends its share to the first of two consumer ranks. Block ids are a random
permutation, as in a fragmented pool. Strides are vLLM's own (``compute_layout_strides``). Planning
reads no memory, so none is allocated.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, compute_layout_strides

from connectors.planning.descriptors import Moves, build_runs
from connectors.planning.layout import EngineLayout, Group, GroupKind, LayerPages, MemoryKind, Region
from connectors.planning.plan import plan_pair
from connectors.planning.verify import prove_plans

LAYOUTS = ("LBNHC", "LBHNC")
"""Token-major, vLLM's default, and head-major."""


def layout_of(
    name: str, tp_rank: int, tp_size: int, layers: int, kv_heads: int, blocks: int, block_tokens: int, content: int
) -> EngineLayout:
    """Return one rank's cache; ``content`` is the number of bytes of one token of one head."""
    heads = kv_heads // tp_size
    spec = FullAttentionSpec(block_size=block_tokens, num_kv_heads=heads, head_size=content // 4, dtype=torch.float16)
    layer, block, head, row, _ = compute_layout_strides(spec, blocks, layers, KVCacheLayout[name])
    pages = tuple(
        LayerPages(f"l{i}", 1 << 40 | i * layer, block, kv_heads, heads, head, block_tokens, row, content, "tokens")
        for i in range(layers)
    )
    region = Region(1 << 40, layers * layer, MemoryKind("DRAM", 0))
    return EngineLayout(tp_rank, tp_size, blocks, (region,), (Group(0, GroupKind.FULL, block_tokens, None, pages),))


def measure(
    name: str, layers: int, kv_heads: int, tokens: int, block_tokens: int, content_bytes: int, rounds: int
) -> dict[str, Any]:
    """Plan ``tokens`` tokens from TP 1 to rank 0 of TP 2. Times are medians of ``rounds``, in
    ms.
    """
    count = tokens // block_tokens
    shape = (layers, kv_heads, 2 * count + 1, block_tokens, content_bytes)
    producer, consumer = layout_of(name, 0, 1, *shape), layout_of(name, 0, 2, *shape)
    rng = np.random.default_rng(1)
    parts = np.zeros(count, np.int64)
    pair_s, runs_s = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        plan = plan_pair(producer, consumer)
        prove_plans(consumer, [plan])
        pair_s.append(time.perf_counter() - began)
        src, dst = (1 + rng.permutation(2 * count)[:count] for _ in range(2))
        began = time.perf_counter()
        runs = build_runs(plan, [Moves(0, src, parts, dst, parts)])
        runs_s.append(time.perf_counter() - began)
    assert runs.total_bytes == layers * tokens * kv_heads // 2 * content_bytes
    return {
        "layout": name,
        "runs": len(runs),
        "run_bytes": int(np.median(runs.length)),
        "plan_pair_ms": 1e3 * median(pair_s),
        "build_runs_ms": 1e3 * median(runs_s),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--content-bytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = []
    print("layout      runs  bytes a run  plan and proof ms  build runs ms")
    for name in LAYOUTS:
        row = measure(name, **vars(arguments))
        rows.append(row)
        print(
            f"{name:8} {row['runs']:9,}  {row['run_bytes']:11,}  {row['plan_pair_ms']:17.1f}"
            f"  {row['build_runs_ms']:13.1f}",
            flush=True,
        )
    from benchmarks.report import write

    print(f"written to {write('kv_layouts', vars(arguments) | {'rows': rows})}")


if __name__ == "__main__":
    main()
