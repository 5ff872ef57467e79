"""Two engines, TP 1 and TP 2, both producer and consumer, shared by the tests of this folder."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from testing.engines import Answer, Pair, describe, generate, start_engine
from testing.identity import MAX_TOKENS
from testing.models import gemma3
from testing.trace import read_trace

# Short, so that tests of expiry do not wait long; long enough for a busy machine.
LIMITS = {"lease_s": 10.0, "progress_s": 10.0, "alive_s": 1.0, "cancel_s": 2.0, "handshake_s": 30.0}


@dataclass
class Engines:
    """Two engines: ``one_to_two`` prefills with TP 1 and decodes with TP 2, ``two_to_one`` vice
    versa.
    """

    runner: asyncio.Runner
    model: str
    one_to_two: Pair
    two_to_one: Pair
    trace: Path

    @property
    def all(self) -> tuple[AsyncLLM, AsyncLLM]:
        return self.one_to_two.prefill, self.one_to_two.decode

    def events(self) -> list[dict[str, Any]]:
        """Return all trace events of both engines, in the order in which they were written."""
        return read_trace(self.trace)

    async def idle(self, within_s: float = 60.0) -> bool:
        """Return whether both block pools return to their baseline. Clears all cached prefixes."""
        deadline = asyncio.get_running_loop().time() + within_s
        while True:
            if all([await engine.reset_prefix_cache() for engine in self.all]):
                return True
            if asyncio.get_running_loop().time() > deadline:
                return False
            await asyncio.sleep(0.1)


async def alone(pair: Pair, prompt: list[int], tokens: int = MAX_TOKENS) -> Answer:
    """Return the decode engine's own answer, the reference, and empty its prefix cache."""
    answer = await generate(pair.decode, prompt, tokens)
    assert await pair.decode.reset_prefix_cache()
    return answer


async def answers(engine: AsyncLLM, prompt: list[int], tokens: int, n: int, transfer: dict[str, Any] | None) -> Any:
    """Send one request and return the token ids of all `n` answers, each the likeliest.

    vLLM refuses several greedy answers, but not several answers limited to one candidate.
    """
    sampling = SamplingParams(
        temperature=1.0,
        top_k=1,
        n=n,
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )
    final = None
    async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), sampling, uuid.uuid4().hex):
        final = output
    assert final is not None
    return [tuple(one.token_ids) for one in final.outputs]


@pytest.fixture(scope="package")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Start both engines, with prefix caching."""
    folder = tmp_path_factory.mktemp("e2e")
    model, trace = gemma3(folder / "gemma3"), folder / "trace.jsonl"
    transfer = LIMITS | {"trace_path": str(trace)}
    with asyncio.Runner() as runner:

        async def start(tp_size: int) -> AsyncLLM:
            return start_engine(model, tp_size, "kv_both", enable_prefix_caching=True, transfer=transfer)

        one = runner.run(start(1))
        two = runner.run(start(2))
        try:
            yield Engines(
                runner,
                model,
                Pair(one, two, runner.run(describe(one))),
                Pair(two, one, runner.run(describe(two))),
                trace,
            )
        finally:
            two.shutdown()
            one.shutdown()
