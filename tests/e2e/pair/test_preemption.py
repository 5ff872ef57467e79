"""A producer without enough blocks preempts requests during a transfer; answers stay right."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import REGISTRY

from testing.engines import Pair, describe, start_engine
from testing.identity import MAX_TOKENS, difference, prompts
from tests.e2e.pair.conftest import LIMITS, Engines, all_reset, alone, until

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="package")]

# Enough blocks for one prompt of 700 tokens (22 of full attention, two windows and a chunk of 512),
# not for two.
BLOCKS = 80
# Arrival times decide whether requests compete for the pool.
ROUNDS = 5


def preemptions() -> float:
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


async def test_preempted_prefills_deliver_the_right_kv(engines: Engines) -> None:
    """Concurrent long prompts preempt each other on a TP 1 producer with a small pool."""
    tight = start_engine(
        engines.model,
        1,
        "kv_producer",
        num_gpu_blocks_override=BLOCKS,
        scheduler_reserve_full_isl=False,
        max_num_batched_tokens=512,
        max_model_len=1024,
        transfer=LIMITS,
    )
    try:
        pair = Pair(tight, engines.one_to_two.decode, await describe(tight))
        # Two chunks each: a finished request still holds its blocks when the next one continues.
        todo = [prompt for prompt in prompts(80, 700, seed=60) if len(prompt) > 560][:8]
        references = [await alone(pair, prompt) for prompt in todo]
        before = preemptions()
        for _ in range(ROUNDS):
            sent = asyncio.gather(*(pair.together(prompt, MAX_TOKENS) for prompt in todo))
            answers = await asyncio.wait_for(sent, timeout=120)
            assert [difference(r, a) for r, a in zip(references, answers, strict=True)] == [None] * len(todo)
            await until(lambda: all_reset(tight, pair.decode))
            if preemptions() > before:
                return
        raise AssertionError("the pool should be too small")
    finally:
        tight.shutdown()
