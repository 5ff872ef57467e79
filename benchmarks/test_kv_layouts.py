"""The benchmark counts the runs of a computation by hand."""

from __future__ import annotations

import pytest
from vllm.v1.kv_cache_interface import KVCacheLayout

from benchmarks.kv_layouts import count_runs


@pytest.mark.parametrize(
    ("model", "tp_pair", "fresh", "runs"),
    [
        # (LBHNC, BLHNC, BHLNC): 1,280 tokens in 10 blocks of 128
        ("Qwen3-8B", (1, 1), True, (36, 1, 1)),
        ("Qwen3-8B", (1, 1), False, (360, 10, 10)),
        ("Qwen3-8B", (2, 4), True, (360, 360, 10)),
        # 18 layers of full attention, 18 with a window of 128 tokens: 10 blocks and 1
        ("gpt-oss-120b", (4, 2), False, (198, 198, 11)),
        # 61 latents on 4 ranks: a decode rank receives 31 of one rank and 30 of another
        ("DeepSeek-V3", (4, 2), True, (31, 10, 10)),
    ],
)
def test_runs_by_hand(model: str, tp_pair: tuple[int, int], fresh: bool, runs: tuple[int, ...]) -> None:
    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC)
    assert tuple(count_runs(model, tp_pair, 128, layout, 1280, fresh) for layout in layouts) == runs
