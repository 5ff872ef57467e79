"""Compare tensor-parallel pairs with one engine, prompt by prompt.

    python -m tests.campaigns.shapes.identity [--prompts 100] [--pairs 1:1,1:2,2:1,2:2]

runs the whole campaign (``make identity``); ``tests/e2e/pair/test_connector.py`` runs a part of it.
The references come from stock engines of the decode side's tensor-parallel size, without a
connector.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from testing import fork_server
from testing.engines import Answer, Pair, describe, generate, start_engine
from testing.identity import MAX_TOKENS, compare, prompts
from testing.models import gemma3


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
    fork_server.prepare()
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
