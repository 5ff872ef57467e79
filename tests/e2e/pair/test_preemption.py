"""A producer without enough blocks preempts requests during a transfer; every answer stays
right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY
from vllm.v1.engine.async_llm import AsyncLLM

from testing.engines import Pair, describe, generate, start_engine
from testing.identity import MAX_TOKENS, difference, prompts
from tests.e2e.pair.conftest import LIMITS, Engines

pytestmark = pytest.mark.engine

# Enough blocks for one prompt of 700 tokens (22 of full attention, two windows and a chunk of 512),
# not for two.
BLOCKS = 80
# Arrival times decide whether requests compete for the pool.
ROUNDS = 5


@pytest.fixture(scope="module")
def tight(engines: Engines) -> Iterator[AsyncLLM]:
    """A TP 1 prefill engine whose small pool admits requests that it cannot complete together."""

    async def start() -> AsyncLLM:
        return start_engine(
            engines.model,
            1,
            "kv_producer",
            num_gpu_blocks_override=BLOCKS,
            scheduler_reserve_full_isl=False,
            max_num_batched_tokens=512,
            max_model_len=1024,
            transfer=LIMITS,
        )

    engine = engines.runner.run(start())
    yield engine
    engine.shutdown()


def preemptions() -> float:
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "vllm:num_preemptions_total"
    )


def test_preempted_prefills_deliver_the_right_kv(engines: Engines, tight: AsyncLLM) -> None:
    """Concurrent long prompts preempt each other on the producer; every answer equals one
    engine's.
    """

    async def run() -> None:
        decode = engines.one_to_two.decode
        pair = Pair(tight, decode, await describe(tight))
        # Two chunks each: a finished request still holds its blocks when the next one continues.
        todo = [prompt for prompt in prompts(80, 700, seed=60) if len(prompt) > 560][:8]
        references = []
        for prompt in todo:
            references.append(await generate(decode, prompt, MAX_TOKENS))
            assert await decode.reset_prefix_cache()
        before = preemptions()
        for _ in range(ROUNDS):
            answers = await asyncio.wait_for(
                asyncio.gather(*(pair.together(prompt, MAX_TOKENS) for prompt in todo)), timeout=120
            )
            assert [difference(r, a) for r, a in zip(references, answers, strict=True)] == [None] * len(todo)
            assert await engines.idle()
            assert await tight.reset_prefix_cache()
            if preemptions() > before:
                break
        assert preemptions() > before, "the pool should be too small"

    engines.runner.run(run())
