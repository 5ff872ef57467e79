"""A decode engine admits a prompt whose KV would not fit its cache without sliding windows.

A small version of vllm#30166's proof, through Tandem's connector. There a prompt of 70,000 tokens
is loaded into a cache with room for its full-attention layers and the windows of all others.
"""

from __future__ import annotations

import os
from math import ceil
from pathlib import Path

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from testing.environment import ENVIRONMENT
from testing.identity import BLOCK_TOKENS, random_prompt
from testing.models import WINDOW_TOKENS, gemma3
from testing.trace import read_trace
from tests.campaigns.shapes.pairs import Case, Shape, alone, engines

pytestmark = pytest.mark.engine

SLIDING_GROUPS = 5
LONGEST = 3072
PROMPT_TOKENS = 3000
STEP_TOKENS = 64
# 96 blocks of full attention; 9 in each sliding group, for the window, two steps of 64 tokens and
# one block; and the null block. With much less vLLM would not start: it requires room for a prompt
# of max_model_len computed here.
BLOCKS = 96 + SLIDING_GROUPS * 9 + 1


async def test_windows_are_enough(tmp_path: Path) -> None:
    """Decode admits two prompts of four times its blocks, one after the other."""
    trace = tmp_path / "trace.jsonl"
    model = gemma3(tmp_path / "gemma3", sliding=SLIDING_GROUPS)
    cases = [Case(random_prompt(PROMPT_TOKENS, seed=80 + i)) for i in range(2)]
    common = {"max_model_len": LONGEST}
    small = {"num_gpu_blocks_override": BLOCKS, "max_num_batched_tokens": STEP_TOKENS}
    async with engines(model, Shape((1, 1)), trace, common, common | small) as both:
        references = await alone(both.prefill, cases)
        assert (await both.send(cases, references, at_once=2))[0] == []
        assert await both.idle()
        blocks = both.decode.vllm_config.cache_config.num_gpu_blocks
    assert both.received() == (2, 0), "decode has computed nothing but the last token"
    asked = [event["blocks"] for event in read_trace(trace) if event["event"] == "receive"]
    whole = ceil(PROMPT_TOKENS / BLOCK_TOKENS)
    # Decode resumes at token 2999; the window before it begins at 2872, in block 89 of 94.
    window = whole - (PROMPT_TOKENS - WINDOW_TOKENS) // BLOCK_TOKENS
    assert window == 5
    assert asked == [{str(group): window for group in range(SLIDING_GROUPS)} | {str(SLIDING_GROUPS): whole}] * 2
    assert blocks is not None
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
