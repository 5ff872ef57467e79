"""Two engines, TP 1 and TP 2, both producer and consumer, shared by the tests of this folder."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
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
BOUND_S = 60.0


@dataclass
class Engines:
    """``one_to_two`` prefills with TP 1 and decodes with TP 2, ``two_to_one`` vice versa."""

    model: str
    one_to_two: Pair
    two_to_one: Pair
    trace: Path

    @property
    def all(self) -> tuple[AsyncLLM, AsyncLLM]:
        return self.one_to_two.prefill, self.one_to_two.decode

    def events(self, start: int = 0, name: str = "") -> list[dict[str, Any]]:
        """Return the trace events of both engines from number ``start``, or those of one kind."""
        return [event for event in read_trace(self.trace)[start:] if event["event"] == name or not name]

    async def idle(self) -> bool:
        """Return whether both block pools return to their baseline. Clears all cached prefixes."""
        await until(lambda: all_reset(*self.all))
        return True


async def all_reset(*engines: AsyncLLM) -> bool:
    return all([await engine.reset_prefix_cache() for engine in engines])


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what must come; the limit only ends a failing test."""
    give_up_at = asyncio.get_running_loop().time() + BOUND_S
    while True:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert asyncio.get_running_loop().time() < give_up_at
        await asyncio.sleep(0.005)


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
    async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), sampling, uuid.uuid4().hex):
        final = output
    return [tuple(one.token_ids) for one in final.outputs]


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def pair_of_engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engines]:
    folder = tmp_path_factory.mktemp("e2e")
    model, trace = gemma3(folder / "gemma3"), folder / "trace.jsonl"
    transfer = LIMITS | {"trace_path": str(trace)}
    one, two = (
        start_engine(model, tp_size, "kv_both", enable_prefix_caching=True, transfer=transfer) for tp_size in (1, 2)
    )
    try:
        yield Engines(model, Pair(one, two, await describe(one)), Pair(two, one, await describe(two)), trace)
    finally:
        two.shutdown()
        one.shutdown()


@pytest_asyncio.fixture(loop_scope="package")
async def engines(pair_of_engines: Engines) -> AsyncIterator[Engines]:
    assert await pair_of_engines.idle()
    yield pair_of_engines
    assert await pair_of_engines.idle()
