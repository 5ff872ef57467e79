"""Identity between two vLLM engines on one GPU and a single engine, for two shapes of KV cache.

    python -m tests.campaigns.gpu.engines FOLDER [--prompts 16]

float32 on Triton's attention, so that rounding does not hide wrong KV: full attention with blocks
of 16 and 32 tokens, and a hybrid of sliding windows and full attention. With two GPUs also TP 1 to
2.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

CACHE_BYTES = 2**28
TOLERANCE = 5e-3
"""Tolerance of the first token's logprob: Triton multiplies float32 in TF32."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for models and traces")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--device", default="cuda:0", help="cpu rehearses on a CPU")
    arguments = parser.parse_args()
    # A process that has initialised CUDA cannot be forked.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    # Imported here, so that importing this module does not import vLLM.
    import torch

    from testing.models import gemma3, llama
    from tests.campaigns.shapes.families import Family, run

    engine: dict[str, Any] = {
        "attention_backend": "TRITON_ATTN",
        "kv_cache_memory_bytes": CACHE_BYTES,
        "gpu_memory_utilization": 0.3,
    }
    block = 16
    if arguments.device == "cpu":
        engine, block = {}, 32
    small, large = {"block_size": block}, {"block_size": 2 * block}
    shapes = {
        f"llama, blocks of {block} to {2 * block}": Family(llama, TOLERANCE, engine, prefill=small, decode=large),
        f"gemma3, blocks of {block}": Family(gemma3, TOLERANCE, engine | small),
    }
    pairs = [(1, 1), (1, 2)] if torch.accelerator.device_count() > 1 else [(1, 1)]
    failed = 0
    for number, (name, family) in enumerate(shapes.items()):
        model = family.build(arguments.folder / str(number))
        for tp in pairs:
            trace = arguments.folder / f"{number}-{tp[0]}-{tp[1]}.jsonl"
            result = asyncio.run(run(family, tp, model, arguments.prompts, trace))
            outcome = result.identity
            failed += not result.good
            print(
                f"found: {name}, TP {tp[0]} -> {tp[1]}: {outcome.checked - len(outcome.wrong)} of "
                f"{outcome.checked} equal, first-token logprobs within {outcome.worst_logprob:.1e}, "
                f"{result.moved} of {result.movable} prompts' KV moved, "
                f"block pools {'at baseline' if result.clean else 'NOT at baseline'}",
                flush=True,
            )
            for line in outcome.wrong:
                print("   ", line, flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
