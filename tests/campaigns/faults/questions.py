"""Prompts of known answers, checked with a plain engine first: only certain answers are used."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from testing.facts import RecallPrompt, make_prompt, prompt_tokens
from testing.servers import MODEL
from tests.campaigns.faults.trials import ANSWER_TOKENS, Question
from tests.campaigns.runner import misquoted

FACTS = (3, 5, 10, 20, 21, 40, 42, 60, 84, 85, 120, 128, 160, 200, 230, 256)
"""Numbers of facts: prompts of 21 to 1,539 tokens, one chunk to seven, on and beside block
boundaries.
"""

EACH = 5
MARGIN = 0.05
"""Margin between the best and the second logprob of each token: chunks of a prompt must not
change the text.
"""


@dataclass(frozen=True)
class Questions:
    by_tokens: dict[int, tuple[Question, ...]]

    def some(self, rng: random.Random, count: int, least: int = 0, most: int = 10**6) -> list[Question]:
        """Return distinct prompts of ``least`` to ``most`` tokens."""
        fitting = [q for tokens, qs in self.by_tokens.items() if least <= tokens <= most for q in qs]
        return rng.sample(fitting, count)

    def twins(self, rng: random.Random) -> list[Question]:
        """Two prompts of equal length with different answers, long enough that their KV matters."""
        fitting = [qs for tokens, qs in self.by_tokens.items() if len(qs) > 1 and tokens >= 100]
        return rng.sample(rng.choice(fitting), 2)


async def known(client: httpx.AsyncClient, plain_url: str, damage: float = 0.0) -> Questions:
    """Ask a plain engine. Raises RuntimeError if too few answers are right and certain."""
    rng = random.Random(2026)
    prompts = [make_prompt(rng, facts) for facts in FACTS for _ in range(EACH)]
    answers = await asyncio.gather(*(_ask(client, plain_url, prompt) for prompt in prompts))
    found: dict[int, list[Question]] = defaultdict(list)
    for prompt, answer in zip(prompts, answers, strict=True):
        if answer["text"].startswith(prompt.answer) and least_margin(answer["logprobs"]["top_logprobs"]) > MARGIN:
            tokens = prompt_tokens(len(prompt.facts))
            found[tokens].append(Question(prompt.text, tokens, misquoted(answer["text"], damage, rng)))
    if sum(map(len, found.values())) < len(prompts) // 3 or sum(len(qs) > 1 for qs in found.values()) < 4:
        raise RuntimeError(
            f"the plain engine is sure of {sum(map(len, found.values()))} of {len(prompts)} answers only"
        )
    return Questions({tokens: tuple(qs) for tokens, qs in found.items()})


async def _ask(client: httpx.AsyncClient, url: str, prompt: RecallPrompt) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt.text, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    answer = await client.post(f"{url}/v1/completions", json=body | {"ignore_eos": True, "logprobs": 2})
    answer.raise_for_status()
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def least_margin(positions: Sequence[dict[str, float]]) -> float:
    """Margin of the engine's least certain token."""
    return min(ordered[0] - ordered[1] for ordered in (sorted(top.values(), reverse=True) for top in positions))
