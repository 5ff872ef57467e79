"""A model with states whose decode engine caches prefixes and whose prefill engine does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing.engines import generate
from testing.identity import MAX_TOKENS, difference, prompts, random_prompt
from testing.models import falcon_h1
from testing.trace import read_trace
from tests.campaigns.shapes.pairs import Case, Shape, alone, engines

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


async def test_the_state_is_moved_and_held_attention_is_not(tmp_path: Path) -> None:
    """Full attention's cached prefix is used without a state at its end."""
    trace = tmp_path / "trace.jsonl"
    cases = [Case(prompt) for prompt in prompts(24, 700, seed=7)]
    caching = {"enable_prefix_caching": True}
    async with engines(falcon_h1(tmp_path / "falcon_h1"), Shape((1, 1)), trace, decode=caching) as both:
        # Decode cannot compute a prompt itself: vLLM's Mamba-2 crashes on the CPU with prefix
        # caching.
        wrong, _ = await both.send(cases, await alone(both.prefill, cases))
        assert wrong == []
        assert both.received() == (sum(case.movable for case in cases), 0)
        (pair,) = both.pairs
        for (tokens, generated, new), blocks in TURNS.items():
            first = random_prompt(tokens, seed=90 + tokens)
            turn = await pair.together(first, generated)
            second = [*first, *(turn.tokens if generated > 2 else ()), *random_prompt(new, seed=91)]
            reference = await generate(both.prefill, second, MAX_TOKENS)
            assert difference(reference, await pair.together(second, MAX_TOKENS)) is None
            receives = [event["blocks"] for event in read_trace(trace) if event["event"] == "receive"]
            assert receives[-1] == {"0": blocks, "1": 1}
