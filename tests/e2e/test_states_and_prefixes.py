"""A model with states whose decode engine caches prefixes and whose prefill engine does not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from testing.engines import Pair, describe, generate, start_engine
from testing.identity import MAX_TOKENS, compare, difference, prompts, random_prompt
from testing.models import falcon_h1
from testing.trace import read_trace

pytestmark = pytest.mark.engine

# tokens of the first turn, tokens generated, new tokens -> blocks of 64 tokens left to move.
TURNS = {
    # 6 whole blocks of the first turn are cached; 699 tokens are 11 blocks.
    (400, 2, 300): 5,
    # 10 of 11 whole blocks are cached; the state is moved again.
    (700, 2, 0): 1,
    # 384 + 69 tokens are computed here or moved: 7 whole blocks of 9.
    (384, 70, 100): 2,
}


def test_the_state_is_moved_and_held_attention_is_not(tmp_path: Path) -> None:
    """Full attention's cached prefix is used without a state at its end: the prompt's last state is
    moved.
    """
    trace = tmp_path / "trace.jsonl"
    model = falcon_h1(tmp_path / "falcon_h1")

    def receives() -> list[dict[str, int]]:
        events = read_trace(trace)
        assert {event["failure"] for event in events if event["event"] == "received"} == {None}
        return [event["blocks"] for event in events if event["event"] == "receive"]

    async def run() -> None:
        transfer = {"trace_path": str(trace)}
        prefill = start_engine(model, 1, "kv_producer", transfer=transfer)
        try:
            decode = start_engine(model, 1, "kv_consumer", transfer=transfer, enable_prefix_caching=True)
            try:
                pair = Pair(prefill, decode, await describe(prefill))
                todo = prompts(24, 700, seed=7)
                # Decode cannot compute a prompt itself: vLLM's Mamba-2 crashes on the CPU with
                # prefix caching.
                cases = [(prompt, await generate(prefill, prompt, MAX_TOKENS)) for prompt in todo]
                assert (await compare(pair, cases)).wrong == ()
                assert len(receives()) == len([prompt for prompt in todo if len(prompt) > 1])
                for (tokens, generated, new), blocks in TURNS.items():
                    first = random_prompt(tokens, seed=90 + tokens)
                    turn = await pair.together(first, generated)
                    answered = turn.tokens if generated > 2 else ()
                    second = [*first, *answered, *random_prompt(new, seed=91)]
                    reference = await generate(prefill, second, MAX_TOKENS)
                    answer = await pair.together(second, MAX_TOKENS)
                    assert difference(reference, answer) is None
                    assert receives()[-1] == {"0": blocks, "1": 1}
            finally:
                decode.shutdown()
        finally:
            prefill.shutdown()

    asyncio.run(run())
