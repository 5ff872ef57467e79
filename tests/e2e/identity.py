"""Identity with one engine: the same tokens and logprobs, whether KV was computed here or came from elsewhere.

    python -m tests.e2e.identity [--prompts 100] [--pairs 1:1,1:2,2:1,2:2]

runs the whole campaign (``make identity``); ``test_connector.py`` runs a cut of it. References come from stock engines
of decode's tensor-parallel size, without any connector.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.engines import Answer, Pair, describe, generate, start_engine
from tests.e2e.models import VOCABULARY, WINDOW_TOKENS, gemma3

BLOCK_TOKENS = 32
MAX_TOKENS = 8
# Two ways of summing float32 may order two tokens differently only where they are this close.
TIE_LOGPROB = 1e-3
LOGPROB_TOLERANCE = 1e-4


def prompts(count: int, longest: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to ``longest`` tokens: every boundary first, then random lengths."""
    rng = random.Random(seed)
    edges = [1, 2]
    for boundary in (BLOCK_TOKENS, WINDOW_TOKENS, WINDOW_TOKENS + BLOCK_TOKENS, 256, 512, 512 + WINDOW_TOKENS, longest):
        edges += [boundary - 1, boundary, boundary + 1]
    # Where the window's far edge falls on a block boundary, producer and consumer keep different blocks.
    edges += [BLOCK_TOKENS * blocks + WINDOW_TOKENS - 1 for blocks in (1, 2, 5, 11)]
    lengths = [n for n in edges if n <= longest][:count]
    lengths += [rng.randint(1, longest) for _ in range(count - len(lengths))]
    return [[rng.randrange(3, VOCABULARY) for _ in range(n)] for n in lengths]


def difference(reference: Answer, answer: Answer, tolerance: float = LOGPROB_TOLERANCE) -> str | None:
    """What is wrong with ``answer``, or None where it is the reference's."""
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


async def compare(
    pair: Pair, cases: Sequence[tuple[list[int], Answer]], tolerance: float = LOGPROB_TOLERANCE
) -> Outcome:
    """Send every prompt through the pair, both legs at once and in turn by turns."""
    wrong: list[str] = []
    worst = 0.0
    for index, (prompt, reference) in enumerate(cases):
        send = pair.in_turn if index % 4 == 3 else pair.together
        answer = await send(prompt, MAX_TOKENS)
        worst = max(worst, abs(reference.logprobs[0][0][1] - answer.logprobs[0][0][1]))
        problem = difference(reference, answer, tolerance)
        if problem:
            wrong.append(f"{len(prompt)} tokens, {send.__name__}: {problem}")
    return Outcome(len(cases), tuple(wrong), worst)


async def _campaign(model: str, pairs: Sequence[tuple[int, int]], count: int, seed: int) -> int:
    todo = prompts(count, 1500, seed)
    references: dict[int, list[Answer]] = {}
    for tp_size in sorted({decode for _, decode in pairs}):
        engine = start_engine(model, tp_size, None)
        references[tp_size] = [await generate(engine, prompt, MAX_TOKENS) for prompt in todo]
        engine.shutdown()
    failed = 0
    for prefill_tp, decode_tp in pairs:
        prefill = start_engine(model, prefill_tp, "kv_producer")
        decode = start_engine(model, decode_tp, "kv_consumer")
        pair = Pair(prefill, decode, await describe(prefill))
        outcome = await compare(pair, list(zip(todo, references[decode_tp], strict=True)))
        clean = await prefill.reset_prefix_cache() and await decode.reset_prefix_cache()
        decode.shutdown()
        prefill.shutdown()
        failed += len(outcome.wrong) + (not clean)
        print(
            f"TP {prefill_tp} -> {decode_tp}: {outcome.checked - len(outcome.wrong)} of {outcome.checked} equal, "
            f"largest first-token logprob difference {outcome.worst_logprob:.1e}, "
            f"block pools {'at baseline' if clean else 'NOT at baseline'}",
            flush=True,
        )
        for line in outcome.wrong:
            print("   ", line, flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--pairs", default="1:1,1:2,2:1,2:2", help="prefill:decode tensor-parallel sizes")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    pairs = [(int(p), int(d)) for p, _, d in (pair.partition(":") for pair in arguments.pairs.split(","))]
    with tempfile.TemporaryDirectory() as folder:
        model = gemma3(Path(folder))
        sys.exit(1 if asyncio.run(_campaign(model, pairs, arguments.prompts, arguments.seed)) else 0)


if __name__ == "__main__":
    main()
