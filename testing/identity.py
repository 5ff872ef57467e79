"""Prompts for a pair of engines, and the difference of its answers from one engine's."""

from __future__ import annotations

import random
from dataclasses import dataclass

from testing.engines import Answer
from testing.models import VOCABULARY, WINDOW_TOKENS

BLOCK_TOKENS = 32
MAX_TOKENS = 8
# Different summation orders in float32 may swap two tokens only if their logprobs are this close.
TIE_LOGPROB = 1e-3
LOGPROB_TOLERANCE = 1e-4


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    """Return prompts of 1 to ``longest`` tokens: every boundary first, then random lengths."""
    rng = random.Random(seed)
    edges = [1, 2]
    for boundary in (BLOCK_TOKENS, WINDOW_TOKENS, WINDOW_TOKENS + BLOCK_TOKENS, 256, 512, 512 + WINDOW_TOKENS, longest):
        edges += [boundary - 1, boundary, boundary + 1]
    # If the window begins at a block boundary, producer and consumer keep different blocks.
    edges += [BLOCK_TOKENS * blocks + WINDOW_TOKENS - 1 for blocks in (1, 2, 5, 11)]
    lengths = [n for n in edges if n <= longest][:count]
    lengths += [rng.randint(1, longest) for _ in range(count - len(lengths))]
    return [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in lengths]


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Return ``tokens`` token ids without special tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]


def difference(reference: Answer, answer: Answer, tolerance: float = LOGPROB_TOLERANCE) -> str | None:
    """Return a description of the difference of ``answer`` from ``reference``, or None."""
    first = abs(reference.logprobs[0][0][1] - answer.logprobs[0][0][1])
    if first > tolerance:
        return f"first-token logprobs differ by {first:.1e}"
    for position, (wanted, got) in enumerate(zip(reference.tokens, answer.tokens, strict=True)):
        if wanted != got:
            (_, best), (_, second) = reference.logprobs[position][:2]
            if best - second < max(TIE_LOGPROB, 2 * tolerance if tolerance > LOGPROB_TOLERANCE else 0.0):
                return None
            return f"token {position} is {got} where {wanted} is best by {best - second:.1e}"
    return None


@dataclass(frozen=True)
class Outcome:
    checked: int
    wrong: tuple[str, ...]
    worst_logprob: float
