"""A decode engine admits a prompt whose KV would not fit its cache without sliding windows.

A small version of vllm#30166's proof, through Tandem's connector. There a prompt of 70,000 tokens
is loaded into a cache with room for its full-attention layers and the windows of all others.
"""

from __future__ import annotations

import asyncio
import os
from math import ceil
from pathlib import Path

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from connectors.vllm_hma.worker_side.trace import read_trace
from testing.engines import Pair, describe, generate, start_engine
from testing.environment import ENVIRONMENT
from testing.identity import BLOCK_TOKENS, MAX_TOKENS, difference, random_prompt
from testing.models import WINDOW_TOKENS, gemma3

pytestmark = pytest.mark.engine

SLIDING_GROUPS = 5
LONGEST = 3072
PROMPT_TOKENS = 3000
STEP_TOKENS = 64
# 96 blocks of full attention; 9 in each sliding group, for the window, two steps of 64 tokens and
# one block; and the null block. With much less vLLM would not start: it requires room for a prompt
# of max_model_len computed here.
BLOCKS = 96 + SLIDING_GROUPS * 9 + 1


def test_windows_are_enough(tmp_path: Path) -> None:
    """Decode admits two prompts of four times its blocks, one after the other, and answers
    right.
    """
    trace = tmp_path / "trace.jsonl"
    model = gemma3(tmp_path / "gemma3", sliding=SLIDING_GROUPS)
    todo = [random_prompt(PROMPT_TOKENS, seed=80 + i) for i in range(2)]

    async def run() -> int:
        common = {"max_model_len": LONGEST, "transfer": {"trace_path": str(trace)}}
        prefill = start_engine(model, 1, "kv_producer", **common)
        try:
            decode = start_engine(
                model, 1, "kv_consumer", num_gpu_blocks_override=BLOCKS, max_num_batched_tokens=STEP_TOKENS, **common
            )
            try:
                pair = Pair(prefill, decode, await describe(prefill))
                references = [await generate(prefill, prompt, MAX_TOKENS) for prompt in todo]
                answers = await asyncio.gather(*(pair.together(prompt, MAX_TOKENS) for prompt in todo))
                assert [difference(r, a) for r, a in zip(references, answers, strict=True)] == [None] * len(todo)
                assert await _idle(pair)
                blocks = decode.vllm_config.cache_config.num_gpu_blocks
                assert blocks is not None
                return blocks
            finally:
                decode.shutdown()
        finally:
            prefill.shutdown()

    blocks = asyncio.run(run())
    events = read_trace(trace)
    received = [event["failure"] for event in events if event["event"] == "received"]
    assert received == [None] * len(todo), "decode has computed nothing but the last token"
    asked = [event["blocks"] for event in events if event["event"] == "receive"]
    whole = ceil(PROMPT_TOKENS / BLOCK_TOKENS)
    # Decode resumes at token 2999; the window before it begins at 2872, in block 89 of 94.
    window = whole - (PROMPT_TOKENS - WINDOW_TOKENS) // BLOCK_TOKENS
    assert asked == [{str(group): window for group in range(SLIDING_GROUPS)} | {str(SLIDING_GROUPS): whole}] * len(todo)
    assert window == 5
    assert (1 + SLIDING_GROUPS) * whole > 3 * blocks
    assert whole + SLIDING_GROUPS * window <= blocks - 1


@pytest.mark.parametrize("whole", [False, True])
def test_whole_allocation_of_that_memory_is_refused(tmp_path: Path, whole: bool) -> None:
    """With the same bytes but without its hybrid manager, vLLM does not start for this length.

    A connector without HMA support disables the manager.
    """
    os.environ.update(ENVIRONMENT)
    config = EngineArgs(
        gemma3(tmp_path / "gemma3", sliding=SLIDING_GROUPS),
        skip_tokenizer_init=True,
        dtype="float32",
        enable_prefix_caching=False,
        block_size=BLOCK_TOKENS,
        max_model_len=LONGEST,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=16,
        disable_hybrid_kv_cache_manager=whole,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 4, "head_size": 32, "dtype": torch.float32}
    full, sliding = FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=WINDOW_TOKENS)
    period = 1 + SLIDING_GROUPS
    specs = {str(layer): full if layer % period == SLIDING_GROUPS else sliding for layer in range(2 * period)}
    memory = BLOCKS * 2 * full.page_size_bytes
    if whole:
        with pytest.raises(ValueError, match="KV cache"):
            get_kv_cache_configs(config, [specs], [memory])
    else:
        (cache,) = get_kv_cache_configs(config, [specs], [memory])
        assert (cache.num_blocks, len(cache.kv_cache_groups)) == (BLOCKS, period)


async def _idle(pair: Pair, within_s: float = 60.0) -> bool:
    deadline = asyncio.get_running_loop().time() + within_s
    while not all([await engine.reset_prefix_cache() for engine in (pair.prefill, pair.decode)]):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True
