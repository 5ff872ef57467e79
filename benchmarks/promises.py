"""Cost of the promises: Tandem's connector with and without its proofs, in one interleaved run.

    python -m benchmarks.promises [--requests 12] [--lengths 200,1000,2000] [--batches 8]
        [--batch 16]

kept   as the service runs it: decode checks a digest of every byte that it fetches (``integrity:
       full``); engines prove to each other that they have the same secret, and tag every message
bare   ``integrity: off``, no secret. The remaining checks are part of the transfer and cannot be
       disabled: deadlines, leases, numbered messages, counted bytes

ttft   from the client's both legs to the decode engine's first token; one request at a time
batch  from a batch of requests of the middle length, sent at once, to the end of its last answer.
       Its throughput is the batch's tokens over that time, so the ratio of throughputs is the
       inverse of the ratio shown

Ratios are kept over bare: above 1 is the cost of the promises. The idle arm is stopped
(``testing/processes.py``).
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from benchmarks.handover import start_arm, tandem
from benchmarks.report import ratios, summary, write
from testing.engines import describe
from testing.models import VOCABULARY, benchmark_gemma3
from testing.processes import Arm

ARMS: dict[str, dict[str, str]] = {
    "kept": {"integrity": "full", "secret": "a secret of the benchmark"},
    "bare": {"integrity": "off"},
}
ANSWER_S = 300.0


def transfers(settings: dict[str, str]) -> tuple[KVTransferConfig, KVTransferConfig]:
    """Return the configurations of a prefill and a decode engine."""
    prefill, decode = (
        KVTransferConfig(
            kv_connector="TandemConnector",
            kv_connector_module_path="connectors.vllm_hma.connector",
            kv_role=role,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=settings,
        )
        for role in ("kv_producer", "kv_consumer")
    )
    return prefill, decode


async def ttft_ms(arm: Arm, address: dict[str, Any], prompt: list[int]) -> float:
    started = time.monotonic()
    _, decode = await asyncio.wait_for(tandem(arm, address, prompt), ANSWER_S)
    return 1e3 * (decode.first_token_at - started)


async def batch_ms(arm: Arm, address: dict[str, Any], prompts: list[list[int]]) -> float:
    started = time.monotonic()
    await asyncio.wait_for(asyncio.gather(*(tandem(arm, address, prompt) for prompt in prompts)), ANSWER_S)
    return 1e3 * (time.monotonic() - started)


async def measure(requests: int, lengths: list[int], batches: int, batch: int, folder: Path) -> dict[str, Any]:
    model = benchmark_gemma3(folder / "model")
    arms: list[Arm] = []
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    try:
        addresses = {}
        for name, settings in ARMS.items():
            arms.append(start_arm(name, model.path, (1, 1), transfers(settings)))
            addresses[name] = await describe(arms[-1].prefill)
            arms[-1].sleep()
        alone: dict[int, dict[str, list[float]]] = {length: {name: [] for name in ARMS} for length in lengths}
        for number in range(-2, requests):
            for length in lengths:
                tokens = prompt(length)
                for arm in rng.sample(arms, len(arms)):
                    with arm.awake():
                        took = await ttft_ms(arm, addresses[arm.name], tokens)
                    if number >= 0:
                        alone[length][arm.name].append(took)
        together: dict[str, list[float]] = {name: [] for name in ARMS}
        middle = sorted(lengths)[len(lengths) // 2]
        for number in range(-1, batches):
            many = [prompt(middle) for _ in range(batch)]
            for arm in rng.sample(arms, len(arms)):
                with arm.awake():
                    took = await batch_ms(arm, addresses[arm.name], many)
                if number >= 0:
                    together[arm.name].append(took)
    finally:
        for arm in arms:
            arm.shutdown()
    return {
        "ttft_ms": {str(length): _compare(both) for length, both in alone.items()},
        "batch_ms": {"requests": batch, "prompt_tokens": middle} | _compare(together),
    }


def _compare(both: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {name: summary(values) for name, values in both.items()}
    return row | {"kept_over_bare": ratios(both["kept"], both["bare"])}


def _line(what: str, row: dict[str, Any]) -> str:
    cells = [f"{row[name]['median']:.1f} ({row[name]['q1']:.1f}-{row[name]['q3']:.1f})" for name in ARMS]
    ratio = row["kept_over_bare"]
    return f"{what:<28} {cells[0]:>26} {cells[1]:>26}   {ratio['of_medians']:.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12, help="measured requests per length and arm")
    parser.add_argument("--lengths", default="200,1000,2000", help="prompt tokens")
    parser.add_argument("--batches", type=int, default=8, help="measured batches per arm")
    parser.add_argument("--batch", type=int, default=16, help="requests in a batch")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(arguments.requests, lengths, arguments.batches, arguments.batch, Path(folder)))
    print(f"{'':<28} {'kept, ms':>26} {'bare, ms':>26}   kept/bare")
    for length, row in result["ttft_ms"].items():
        print(_line(f"TTFT, {length} tokens", row))
    batch = result["batch_ms"]
    print(_line(f"{batch['requests']} at once, {batch['prompt_tokens']} tokens", batch))
    print("written to", write("promises", {"requests": arguments.requests, **result}))


if __name__ == "__main__":
    main()
