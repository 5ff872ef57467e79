"""An engine stores KV and is killed; another one loads it.

    python -m tests.campaigns.store.restart

For each model: an engine answers prompts and is ended by ``kill -9``. Another engine with another
TP size and another block size, at the same path, answers them again. Tokens and logprobs must be
equal, and nearly all prompt tokens must come from the store. Engines are separate processes, so
that a kill is real.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
MAX_TOKENS = 8
CHUNK = 128
MOST_DIFFERENCE = 2e-3
"""Tolerance of a logprob: ranks add in another order."""


@dataclass(frozen=True)
class Case:
    """A model and the two engines."""

    model: str
    first: dict[str, Any]
    second: dict[str, Any]


CASES = (
    Case("gemma3", {"tp": 1, "block_size": 32}, {"tp": 2, "block_size": 16}),
    Case("llama", {"tp": 2, "block_size": 32}, {"tp": 1, "block_size": 64}),
    Case("falcon_h1", {"tp": 1, "block_size": 32}, {"tp": 2, "block_size": 64}),
)


def prompts(count: int) -> list[list[int]]:
    """Return random prompts of one to six chunks and a rest, some with common prefixes."""
    import random

    dice = random.Random(11)
    found: list[list[int]] = []
    for number in range(count):
        begun = found[number // 2][: 2 * CHUNK] if number % 3 == 2 else []
        length = dice.randrange(CHUNK + 20, 6 * CHUNK)
        found.append(begun + [dice.randrange(4, 500) for _ in range(max(20, length - len(begun)))])
    return found


async def serve(options: argparse.Namespace, asked: list[list[int]]) -> None:
    """Answer the prompts, print the answers as JSON, and wait to be killed."""
    from vllm.config import KVTransferConfig

    from testing.engines import generate, start_engine

    store = {"path": options.path, "disk_gib": 1.0, "chunk_tokens": CHUNK, "staging_mib": 128, "lookup_s": 2.0}
    transfer = KVTransferConfig(
        kv_connector="TandemStoreConnector",
        kv_connector_module_path="connectors.vllm_hma.store_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": store},
    )
    # States exist where a step ends: a step is a chunk.
    engine = start_engine(
        options.model,
        options.tp,
        None,
        kv_transfer_config=transfer,
        block_size=options.block_size,
        max_num_batched_tokens=CHUNK,
        max_num_seqs=4,
        num_gpu_blocks_override=options.blocks or None,
    )
    answers = []
    for prompt in asked:
        began = time.monotonic()
        answer = await generate(engine, prompt, MAX_TOKENS)
        seconds = time.monotonic() - began
        answers.append([answer.tokens, answer.logprobs, answer.cached_tokens, seconds])
    # Let writes in progress end: the fault campaign covers a kill during a write.
    await asyncio.sleep(1.0)
    print("answers " + json.dumps(answers), flush=True)
    await asyncio.sleep(600)


def run_engine(model: str, path: Path, prompt_file: Path, engine: dict[str, Any]) -> list[Any]:
    """Start an engine, read its answers, and kill it and its workers."""
    command = [sys.executable, "-m", "tests.campaigns.store.restart", "--serve", "--model", model]
    command += ["--path", str(path), "--prompts", str(prompt_file)]
    for key, value in engine.items():
        command += [f"--{key.replace('_', '-')}", str(value)]
    log = path.parent / f"engine-{engine['tp']}-{engine['block_size']}.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("answers "):
                    found: list[Any] = json.loads(line.removeprefix("answers "))
                    return found
            causes = [line for line in log.read_text().splitlines() if "Error" in line]
            raise RuntimeError("the engine ended: " + "\n".join(causes[:8]))
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def compare(first: list[Any], second: list[Any]) -> list[str]:
    """Return differences of tokens, and of logprobs of the sampled tokens."""
    found = []
    for number, (one, other) in enumerate(zip(first, second, strict=True)):
        if one[0] != other[0]:
            found.append(f"prompt {number}: tokens {other[0]} instead of {one[0]}")
            continue
        worst = max(abs(a[0][1] - b[0][1]) for a, b in zip(one[1], other[1], strict=True))
        if worst > MOST_DIFFERENCE:
            found.append(f"prompt {number}: a logprob differs by {worst:.4f}")
    return found


def check(case: Case, make: Callable[[Path], str], count: int) -> bool:
    """Run one case; return whether it is right."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = make(root / "model")
        prompt_file = root / "prompts.json"
        asked = prompts(count)
        prompt_file.write_text(json.dumps(asked))
        first = run_engine(model, root / "store", prompt_file, case.first)
        second = run_engine(model, root / "store", prompt_file, case.second)
        wrong = compare(first, second)
        loadable = sum((len(prompt) - 1) // CHUNK * CHUNK for prompt in asked)
        loaded = sum(answer[2] or 0 for answer in second)
        files = list((root / "store" / "objects").glob("*/*"))
        print(
            f"{case.model}: TP {case.first['tp']} blocks of {case.first['block_size']}, killed; TP {case.second['tp']} "
            f"blocks of {case.second['block_size']}: {count} prompts, {loaded} of {loadable} whole-chunk tokens loaded "
            f"(cold {sum(answer[2] or 0 for answer in first)}), {len(files)} objects, {len(wrong)} wrong; "
            f"{sum(answer[3] for answer in first):.2f} s, then {sum(answer[3] for answer in second):.2f} s"
        )
        for line in wrong[:5]:
            print(f"  {line}")
        return not wrong and loaded >= 0.95 * loadable


def main() -> int:
    """Return 0 if all cases are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[case.model for case in CASES])
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    for name in ("model", "path", "prompts"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in ("tp", "block-size", "blocks"):
        parser.add_argument(f"--{name}", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options, json.loads(Path(options.prompts).read_text())))
        return 0
    from testing import models

    makers: dict[str, Callable[[Path], str]] = {
        "gemma3": models.gemma3,
        "llama": models.llama,
        "falcon_h1": models.falcon_h1,
    }
    results = [check(case, makers[case.model], options.count) for case in CASES if case.model in options.only]
    return 0 if all(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
