"""A decode engine admits a prompt whose KV would not fit its cache without sliding windows.

A small version of vllm#30166's proof, through Tandem's connector. There a prompt of 70,000 tokens
is loaded into a cache with room for its full-attention layers and the windows of all others.
"""

from __future__ import annotations

from math import ceil
from pathlib import Path

import pytest

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
