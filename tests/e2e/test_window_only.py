"""A decode engine admits a prompt whose KV would not fit its cache, were it allocated whole: its windows do.

This is vllm#30166's proof on a small scale, through Tandem's connector: there a prompt of 70,000 tokens is loaded from
outside into a cache that has room for its full-attention layers and the windows of all others.
"""

from __future__ import annotations

import asyncio
import json
from math import ceil
from pathlib import Path

import pytest

from tests.e2e.engines import Pair, describe, generate, start_engine
from tests.e2e.identity import BLOCK_TOKENS, MAX_TOKENS, difference
from tests.e2e.models import WINDOW_TOKENS, gemma3
from tests.e2e.test_connector import random_prompt

pytestmark = pytest.mark.engine

SLIDING_GROUPS = 5
LONGEST = 3072
PROMPT_TOKENS = 3000
STEP_TOKENS = 64
# The least with which vLLM starts: 96 blocks of full attention, 9 in each sliding group (the window, two steps of 64
# tokens, one block), and the null block.
BLOCKS = 96 + SLIDING_GROUPS * 9 + 1


def test_windows_are_enough(tmp_path: Path) -> None:
    """Two prompts, each of four times the blocks that decode has, are admitted in turn and answered right."""
    trace = tmp_path / "trace.jsonl"
    model = gemma3(tmp_path / "gemma3", sliding=SLIDING_GROUPS)
    todo = [random_prompt(PROMPT_TOKENS, seed=80 + i) for i in range(2)]

    async def run() -> int:
        common = {"max_model_len": LONGEST, "transfer": {"trace_path": str(trace)}}
        prefill = start_engine(model, 1, "kv_producer", **common)
        try:
            decode = start_engine(
                model,
                1,
                "kv_consumer",
                num_gpu_blocks_override=BLOCKS,
                max_num_batched_tokens=STEP_TOKENS,
                **common,
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
    events = [json.loads(line) for line in trace.read_text().splitlines()]
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


async def _idle(pair: Pair, within_s: float = 10.0) -> bool:
    deadline = asyncio.get_running_loop().time() + within_s
    while not all([await engine.reset_prefix_cache() for engine in (pair.prefill, pair.decode)]):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True
