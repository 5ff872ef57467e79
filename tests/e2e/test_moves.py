"""Running requests that end on one engine and continue on another one with their KV."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from actors.engine.vllm_engine import VllmEngine
from actors.request import Call, Endpoint, Moved
from configs.settings.kv import TransferSettings
from connectors.protocol.params import EMITTED_TOKENS
from testing.engines import SUPERVISOR, run_or_move, start_engine
from testing.identity import prompts
from testing.sse import said
from testing.streams import KINDS, completion
from testing.trace import read_trace
from tests.campaigns.shapes.families import FAMILIES
from tests.e2e.pair.conftest import BOUND_S, all_reset, until
from tests.e2e.two_engines import HEADERS, SETTINGS, start, stream

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TOKENS, STREAMS = 48, 16


@dataclass(frozen=True)
class Case:
    """A family of models, TP sizes of the engine that stops and of the other one, and the latter's
    arguments.
    """

    family: str
    tp: tuple[int, int] = (1, 1)
    other: dict[str, Any] = field(default_factory=dict)


CASES = {
    "llama": Case("llama"),
    "sliding windows, TP 1 to 2, blocks of 32 to 64": Case("gemma3", (1, 2), {"block_size": 64}),
    "sliding windows, TP 2 to 1": Case("gemma3", (2, 1)),
    "states, TP 1 to 2": Case("falcon_h1", (1, 2)),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_moved_stream_is_that_of_one_engine(tmp_path: Path, name: str) -> None:
    """Streams move at random steps while others run; the other engine computes one token anew."""
    case, draw, trace = CASES[name], random.Random(name), tmp_path / "trace.jsonl"
    family = FAMILIES[case.family]
    model = family.build(tmp_path / "model")
    transfer = {"supervisor": SUPERVISOR, "lease_s": 30.0}
    arguments = family.engine | {"transfer": transfer}
    source = start_engine(model, case.tp[0], "kv_consumer", **arguments)
    target = start_engine(
        model,
        case.tp[1],
        "kv_consumer",
        **arguments | case.other | {"transfer": transfer | {"trace_path": str(trace)}},
    )
    try:
        todo = prompts(STREAMS, 700, seed=3)
        references = await asyncio.gather(*(run_or_move(source, prompt, {}, TOKENS) for prompt in todo))

        async def move(prompt: list[int], expected: list[int]) -> tuple[int, bool]:
            sent, params = await run_or_move(source, prompt, {}, TOKENS, draw.randint(1, TOKENS - 4))
            if params is None:
                return TOKENS, sent == expected
            assert params["remote_num_tokens"] == len(prompt) + len(sent) - 1
            received = {EMITTED_TOKENS: sent, "kv_transfer_params": params}
            more, _ = await run_or_move(target, prompt, received, TOKENS)
            return len(sent), [*sent, *more] == expected

        moved = await asyncio.gather(*(move(prompt, one) for prompt, (one, _) in zip(todo, references, strict=True)))
        assert all(equal for _, equal in moved), moved
        ends = [event["failure"] for event in read_trace(trace) if event["event"] == "received"]
        assert ends == [None] * sum(sent < TOKENS for sent, _ in moved) * case.tp[1]
        assert len(ends) >= STREAMS // 2
        await until(lambda: all_reset(source, target))
    finally:
        target.shutdown()
        source.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_engines() -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
    """Blocks are free again because nothing holds them, not because a lease has ended."""
    settings = SETTINGS.model_copy(update={"transfer": TransferSettings(lease_s=10 * BOUND_S)})
    engines = [await start(settings=settings) for _ in range(2)]
    try:
        yield engines[0], engines[1]
    finally:
        for engine in engines:
            await engine.close()


async def test_a_stream_that_ends_while_it_moves_holds_nothing(two_engines: tuple[VllmEngine, VllmEngine]) -> None:
    """Its last token completes a stop string, or its client goes: no engine asks for its KV."""
    engine, _ = two_engines
    endpoint, body = KINDS["greedy"]
    text, ends, may_move = said(await stream(engine, endpoint, body))["text"], [], []
    for stop in (*text[1:6], "none"):
        call = Call("POST", endpoint, HEADERS, json.dumps(body | {"stop": stop}).encode(), movable=True)
        async with aclosing(engine.serve(call)) as items:
            async for item in items:
                may_move += list(engine.movable())
                for each in engine.movable():
                    await engine.move(each)
                ends.append(isinstance(item, Moved))
                if ends[-1]:
                    break
    assert any(ends)
    assert may_move
    await until(lambda: all_reset(engine._llm))  # noqa: SLF001 - no public way to the block pool


PATTERN = {"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 40}
STAY: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "logprobs": KINDS["logprobs"],
    "seed": KINDS["penalties"],
    "interval": completion(temperature=0, ignore_eos=True, stream_interval=4),
    "repetition": completion(temperature=0, ignore_eos=True, repetition_detection=PATTERN),
}


@pytest.mark.parametrize("kind", STAY)
async def test_some_streams_stay(two_engines: tuple[VllmEngine, VllmEngine], kind: str) -> None:
    """Logprobs and seeds depend on the steps. vLLM delays the end of the others, or misses it."""
    engine, _ = two_engines
    endpoint, body = STAY[kind]
    call = Call("POST", endpoint, HEADERS, json.dumps(body).encode(), movable=True)
    may_move = []
    async with aclosing(engine.serve(call)) as items:
        async for _ in items:
            may_move.append(engine.movable())
    assert len(may_move) > 2
    assert not any(may_move)
