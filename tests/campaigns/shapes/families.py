"""Identity with one engine for every kind of KV cache, between engines of unequal shape.

    python -m tests.campaigns.shapes.families [--families llama,falcon_h1]
        [--pairs 1:1,1:2,2:1] [--prompts 24]

runs the whole campaign (``make families``); ``test_families.py`` runs a part. The reference of each
pair is one engine of decode's tensor-parallel size that computes everything: decode alone, with its
prefix cache off, if it can.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from testing import fork_server
from testing.engines import Pair, describe, generate, start_engine
from testing.identity import LOGPROB_TOLERANCE, MAX_TOKENS, Outcome, compare, prompts
from testing.models import deepseek_v2, falcon_h1, gemma3, gpt_oss, llama, llama4, qwen3_next
from testing.trace import read_trace

LONGEST = 700


@dataclass(frozen=True)
class Family:
    """A kind of model: its creation, and its engines.

    ``prefill`` and ``decode`` are engine arguments of one side; ``tolerance`` is that of the first
    token's logprob, ``pairs`` the tensor-parallel sizes to try. ``alone`` is the engine for the
    reference: decode, unless it cannot compute a prompt.
    """

    build: Callable[[Path], str]
    tolerance: float = LOGPROB_TOLERANCE
    engine: dict[str, Any] = field(default_factory=dict)
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    pairs: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 1))
    alone: Literal["prefill", "decode"] = "decode"


# A bfloat16 cache computed by another number of ranks differs by rounding from one's own.
_BFLOAT16: dict[str, Any] = {"engine": {"dtype": "bfloat16"}, "tolerance": 0.3}
# vLLM's CPU attention stores FP8 on x86 with AVX-512 or AMX, and no INT8.
_FP8: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}
_HALF, _WHOLE = {"block_size": 32}, {"block_size": 64}

FAMILIES: dict[str, Family] = {
    "llama": Family(llama, pairs=((1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (4, 4))),
    "gemma3": Family(gemma3),
    "gpt_oss": Family(gpt_oss),
    "llama4": Family(llama4),
    # The kernel that vLLM prefers on a CPU with AMX runs in bfloat16 only, and rounding would hide
    # wrong KV.
    "deepseek_v2": Family(deepseek_v2, engine={"attention_backend": "CPU_MLA"}),
    "falcon_h1": Family(falcon_h1),
    # With prefix caching, states have their own blocks, and vLLM's Mamba-2 kernels crash on the CPU
    # with any prompt.
    "falcon_h1_align_decode": Family(
        falcon_h1, decode={"enable_prefix_caching": True}, pairs=((1, 1),), alone="prefill"
    ),
    "falcon_h1_two_groups": Family(lambda folder: falcon_h1(folder, state_groups=2)),
    "qwen3_next": Family(qwen3_next, **_BFLOAT16),
    "llama_fp8": Family(llama, tolerance=0.3, engine=_FP8),
    "gemma3_fp8_blocks_32_to_64": Family(
        gemma3, tolerance=0.3, engine=_FP8, prefill=_HALF, decode=_WHOLE, pairs=((1, 2),)
    ),
    "gemma3_blocks_32_to_64": Family(gemma3, prefill=_HALF, decode=_WHOLE, pairs=((1, 1), (1, 2))),
    "gemma3_blocks_64_to_32": Family(gemma3, prefill=_WHOLE, decode=_HALF, pairs=((1, 1), (2, 1))),
}


@dataclass(frozen=True)
class Result:
    """Result of one pair.

    ``moved`` of ``movable`` prompts received all their KV from the other engine; a prompt of one
    token has none. ``clean``: both block pools are at their baseline.
    """

    identity: Outcome
    moved: int
    movable: int
    clean: bool

    @property
    def good(self) -> bool:
        return not self.identity.wrong and self.moved == self.movable and self.clean


async def run(
    family: Family, tp: tuple[int, int], model: str, count: int, trace: Path, tokens: int = MAX_TOKENS
) -> Result:
    """Start a pair and send ``count`` prompts through it, each once, for ``tokens`` tokens."""
    transfer = {"trace_path": str(trace)}
    sides = (("kv_producer", tp[0], family.prefill), ("kv_consumer", tp[1], family.decode))
    started = []
    try:
        for role, size, own in sides:
            started.append(start_engine(model, size, role, transfer=transfer, **(family.engine | own)))
        prefill, decode = started
        pair = Pair(prefill, decode, await describe(prefill))
        todo = prompts(count, LONGEST, seed=7)
        reference = decode if family.alone == "decode" else prefill
        cases = [(prompt, await generate(reference, prompt, tokens)) for prompt in todo]
        outcome = await compare(pair, cases, family.tolerance, tokens)
        clean = await _idle(started)
        return Result(outcome, _received(trace, tp[1]), sum(len(prompt) > 1 for prompt in todo), clean)
    finally:
        for engine in reversed(started):
            engine.shutdown()


def _received(trace: Path, ranks: int) -> int:
    """Return the number of requests whose KV has arrived completely on every decode rank."""
    events = read_trace(trace)
    whole = Counter(e["request"] for e in events if e["event"] == "received" and e["failure"] is None)
    return sum(count == ranks for count in whole.values())


async def _idle(engines: Sequence[Any], within_s: float = 10.0) -> bool:
    deadline = asyncio.get_running_loop().time() + within_s
    while not all([await engine.reset_prefix_cache() for engine in engines]):
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.1)
    return True


def _runs_here(family: Family) -> bool:
    """Return whether vLLM's CPU attention has kernels for the family's cache on this machine."""
    try:
        _get_attn_isa(torch.bfloat16, 32, 32, family.engine.get("kv_cache_dtype"))
    except NotImplementedError:
        return False
    return True


def main() -> None:
    fork_server.prepare()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(name for name in FAMILIES if _runs_here(FAMILIES[name])))
    parser.add_argument("--pairs", help="prefill:decode tensor-parallel sizes, instead of each family's own")
    parser.add_argument("--prompts", type=int, default=30)
    arguments = parser.parse_args()
    failed = 0
    for name in arguments.families.split(","):
        family = FAMILIES[name]
        pairs = family.pairs
        if arguments.pairs:
            pairs = tuple((int(p), int(d)) for p, _, d in (pair.partition(":") for pair in arguments.pairs.split(",")))
        with tempfile.TemporaryDirectory() as folder:
            model = family.build(Path(folder) / name)
            for tp in pairs:
                trace = Path(folder) / f"{tp[0]}-{tp[1]}.jsonl"
                result = asyncio.run(run(family, tp, model, arguments.prompts, trace))
                outcome = result.identity
                failed += not result.good
                print(
                    f"{name}, TP {tp[0]} -> {tp[1]}: {outcome.checked - len(outcome.wrong)} of {outcome.checked} equal,"
                    f" largest first-token logprob difference {outcome.worst_logprob:.1e},"
                    f" {result.moved} of {result.movable} prompts' KV moved,"
                    f" block pools {'at baseline' if result.clean else 'NOT at baseline'}",
                    flush=True,
                )
                for line in outcome.wrong:
                    print("   ", line, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
