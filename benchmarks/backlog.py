"""Decode during a prefill backlog: blocks held for waiting prompts, throughput, and TTFT when idle.

    python -m benchmarks.backlog --before CHECKOUT [--rounds 4] [--short-every-s 0.1]

``CHECKOUT`` is another revision's work tree with this environment. Rounds alternate between it and
this one, each in separate processes. Each round runs two engines of TP 1 (prefill and decode, a
small Llama):

idle     one request at a time, both legs at once, one token: TTFT
backlog  both legs of many long prompts at once, as a router sends them, while short requests for
         decode alone arrive one after the other. The decode pool has room for a quarter of the
         prompts, and prefill is the bottleneck. ``tokens_per_s`` counts requests that decode
         answered before the last of the long ones. It is decode's throughput only if the short
         requests saturate decode: ``--short-every-s`` sets the time between two of them

The connector's traces show when a transfer holds *idle* blocks: from its ``receive`` event to the
first ``chunk`` of its prompt. Both engines trace with the clock of one host.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from itertools import pairwise
from pathlib import Path
from typing import Any

PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 32, 1800, 16
SHORT_EVERY_S, SHORT_TOKENS = 0.1, 48
IDLE_REQUESTS, IDLE_TOKENS = 24, 700
BLOCK_TOKENS = 32
POOL_BLOCKS = PROMPTS * (PROMPT_TOKENS + ANSWER_TOKENS) // BLOCK_TOKENS // 4


def blocks_held(events: list[dict[str, Any]], ids: list[str]) -> dict[str, float]:
    """Return peak and mean of the blocks held for prompts that have not started, over the
    backlog.
    """
    held: dict[str, tuple[float, int]] = {}
    started: dict[str, float] = {}
    for event in events:
        if event["event"] == "receive":
            held[event["transfer"]] = event["t"], sum(event["blocks"].values())
        elif event["event"] == "chunk":
            for each in ids:
                if event["request"].startswith(each):
                    started.setdefault(each, event["t"])
    changes = []
    for each in ids:
        if each in held and held[each][0] < started[each]:
            changes += [(held[each][0], held[each][1]), (started[each], -held[each][1])]
    now, peak, block_seconds = 0, 0, 0.0
    changes.sort()
    for (at, change), (until, _) in pairwise(changes):
        now += change
        peak = max(peak, now)
        block_seconds += now * (until - at)
    lasts = max(started.values()) - min(event["t"] for event in events)
    return {"peak": peak, "mean": block_seconds / lasts}


async def measure(folder: Path, short_every_s: float) -> dict[str, Any]:
    """Run one round of the checkout whose modules are imported."""
    from prometheus_client import REGISTRY

    from testing.engines import describe, generate, start_engine
    from testing.identity import random_prompt
    from testing.models import llama
    from testing.sequential_proxy import PRODUCE
    from testing.trace import read_trace

    model, trace = llama(folder / "llama"), folder / "trace.jsonl"
    options: dict[str, Any] = {"max_model_len": 2048, "transfer": {"trace_path": str(trace)}, "max_num_seqs": 32}
    prefill = start_engine(model, 1, "kv_producer", **options)
    decode = start_engine(model, 1, "kv_consumer", num_gpu_blocks_override=POOL_BLOCKS, **options)
    try:
        address = await describe(prefill)

        async def split(prompt: list[int], transfer: str, tokens: int) -> float:
            """Return the seconds until decode has answered; sends both legs at once."""
            params = {"transfer_id": transfer}
            began = time.monotonic()
            first = asyncio.ensure_future(
                generate(prefill, prompt, 1, PRODUCE | params, logprobs=None, request_id=transfer)
            )
            await generate(decode, prompt, tokens, address | params, logprobs=None)
            took = time.monotonic() - began
            await first
            return took

        await split(random_prompt(IDLE_TOKENS, seed=1), uuid.uuid4().hex, 2)
        idle = [
            await split(random_prompt(IDLE_TOKENS, seed=10 + number), uuid.uuid4().hex, 1)
            for number in range(IDLE_REQUESTS)
        ]
        start, ids = len(read_trace(trace)), [uuid.uuid4().hex for _ in range(PROMPTS)]
        preempted = preemptions(REGISTRY)
        began = time.monotonic()
        long = [
            asyncio.ensure_future(split(random_prompt(PROMPT_TOKENS, seed=100 + number), each, ANSWER_TOKENS))
            for number, each in enumerate(ids)
        ]
        short: list[asyncio.Future[float]] = []

        async def alone(number: int) -> float:
            began = time.monotonic()
            await generate(decode, random_prompt(40, seed=500 + number), SHORT_TOKENS, logprobs=None)
            return time.monotonic() - began

        while not all(each.done() for each in long):
            short.append(asyncio.ensure_future(alone(len(short))))
            await asyncio.sleep(short_every_s)
        took = time.monotonic() - began
        done = [each for each in short if each.done()]
        answered = sorted(each.result() for each in long)
        shorts = sorted(await asyncio.gather(*short))
        return {
            "idle_ttft_ms": [1000 * each for each in idle],
            "held": blocks_held(read_trace(trace)[start:], ids),
            "pool_blocks": POOL_BLOCKS,
            "tokens_per_s": (PROMPTS * ANSWER_TOKENS + len(done) * SHORT_TOKENS) / took,
            "long_median_s": statistics.median(answered),
            "long_last_s": answered[-1],
            "short_median_s": statistics.median(shorts),
            "short_p90_s": shorts[int(0.9 * len(shorts))],
            "shorts": len(shorts),
            "short_every_s": short_every_s,
            "preemptions": preemptions(REGISTRY) - preempted,
        }
    finally:
        decode.shutdown()
        prefill.shutdown()


def preemptions(registry: Any) -> float:
    """Return the number of preempted requests of both engines so far."""
    samples = (sample for metric in registry.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:num_preemptions_total")


def one_round(checkout: Path, short_every_s: float) -> dict[str, Any]:
    """Measure a checkout in its own process."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [sys.executable, __file__, "--once", out.name, "--short-every-s", str(short_every_s)]
        subprocess.run(command, env=environment, cwd=checkout, check=True)
        found: dict[str, Any] = json.loads(Path(out.name).read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Alternate between the two checkouts, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="checkout of the revision to compare with")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--short-every-s", type=float, default=SHORT_EVERY_S)
    parser.add_argument("--out", type=Path, help="file to append one line per round to; resumes from its rounds")
    parser.add_argument("--once", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once is not None:
        with tempfile.TemporaryDirectory() as folder:
            arguments.once.write_text(json.dumps(asyncio.run(measure(Path(folder), arguments.short_every_s))))
        return
    here = Path(__file__).resolve().parents[1]
    checkouts = {"before": arguments.before.resolve(), "after": here}
    rounds: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        rounds = [json.loads(line) for line in arguments.out.read_text().splitlines()]
    for number in range(arguments.rounds):
        for arm in ("before", "after") if number % 2 == 0 else ("after", "before"):
            rounds.append({"arm": arm, **one_round(checkouts[arm], arguments.short_every_s)})
            shown = {key: value for key, value in rounds[-1].items() if key != "idle_ttft_ms"}
            print(shown, statistics.median(rounds[-1]["idle_ttft_ms"]), flush=True)
            if arguments.out is not None:
                with arguments.out.open("a") as file:
                    file.write(json.dumps(rounds[-1]) + "\n")
    report(rounds)


def report(rounds: list[dict[str, Any]]) -> None:
    """Print a table of medians, and write ``results/backlog.json``."""
    from benchmarks.report import summary, write

    for arm in ("before", "after"):
        own = [each for each in rounds if each["arm"] == arm]
        idle = summary([ttft for each in own for ttft in each["idle_ttft_ms"]])
        print(f"{arm}: idle TTFT {idle['median']:.1f} ms ({idle['q1']:.1f} to {idle['q3']:.1f})")
        for key in ("tokens_per_s", "long_median_s", "long_last_s", "short_median_s", "short_p90_s", "preemptions"):
            print(f"  {key}: {statistics.median(each[key] for each in own):.2f}")
        for key in ("peak", "mean"):
            print(f"  idle blocks, {key}: {statistics.median(each['held'][key] for each in own):.0f} of {POOL_BLOCKS}")
    print(write("backlog", {"command": "python -m benchmarks.backlog", "rounds": rounds}))


if __name__ == "__main__":
    main()
