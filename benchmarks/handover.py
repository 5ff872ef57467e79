"""Handover and TTFT of Tandem's connector beside a peer, between engines.

The peer is vLLM's NixlConnector, or ``bare``: Tandem without digests, secret and message tags
(``integrity: off``), to measure their cost. Deadlines, leases, numbered messages and counted bytes
cannot be disabled. TP is the tensor-parallel sizes, prefill:decode. In one interleaved run; the
idle arm is stopped:

ttft      from the client's request to the decode engine's first token. Tandem's legs are sent at
          once; NixlConnector's one after the other, as its protocol requires
handover  from the prefill engine's first token (its last chunk has ended) to the decode engine's
          first token, both stamped in the engine cores with the clock that all processes share
step      one decode step of the same request; the rest of a handover is the connector's
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engines import ROLES, Side, random_prompt, start_arms, start_side
from benchmarks.report import ratios, spread, summary, turns, write
from testing.models import benchmark_gemma3

DECODE_TOKENS = 9
NIXL_FIRST_PORT = 5600
SECRET = "a secret of the benchmark"
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "block_size": 32, "enable_prefix_caching": False}
Samples = dict[str, list[float]]


async def measure(
    requests: int, lengths: tuple[int, ...], tp_sizes: list[int], peer: str, folder: Path
) -> dict[str, Any]:
    model = benchmark_gemma3(folder / "model").path

    def start(name: str, role: str) -> Side:
        number = ROLES.index(role)
        proofs = {"integrity": "off"} if name == "bare" else {"integrity": "full", "secret": SECRET}
        own = {"connector": "NixlConnector"} if name == "nixl" else {"transfer": proofs if peer == "bare" else {}}
        variables = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_FIRST_PORT + 10 * number)}
        return start_side(model, role, None, variables, tp_sizes[number], pinned=False, **ENGINE | own)

    dice = random.Random(0)
    samples: dict[tuple[int, str], Samples] = defaultdict(lambda: defaultdict(list))
    with ExitStack() as stack:
        arms = await start_arms(stack, ("tandem", peer), start)
        for length, name, counted in turns(list(arms), requests, lengths, warm_up=2):
            prompt = random_prompt(dice, length)
            with arms[name].awake():
                started = time.monotonic()
                send = arms[name].in_turn if name == "nixl" else arms[name].together
                answer = await send(prompt, DECODE_TOKENS)
                await asyncio.sleep(0.2)
            last = answer.metrics
            handover_ms = 1e3 * (last.first_token_ts - answer.prefill.metrics.first_token_ts)
            step_ms = 1e3 * (last.last_token_ts - last.first_token_ts) / (DECODE_TOKENS - 1)
            values = {"ttft_ms": 1e3 * (answer.token_at[0] - started), "handover_ms": handover_ms}
            values |= {"step_ms": step_ms, "beyond_step_ms": handover_ms - step_ms}
            for kind, value in values.items() if counted else ():
                samples[length, name][kind].append(value)
    return {str(length): _compare(samples[length, "tandem"], samples[length, peer], peer) for length in lengths}


def _compare(tandem: Samples, other: Samples, peer: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for kind, values in tandem.items():
        table[kind] = {"tandem": summary(values)}
        if kind in other:
            table[kind][peer] = summary(other[kind])
        if kind in ("ttft_ms", "handover_ms", "beyond_step_ms"):
            table[kind]["ratio"] = ratios(values, other[kind])
    return table


def main(
    *, requests: int = 12, lengths: tuple[int, ...] = (200, 1000, 2000), tp: str = "1:1", peer: str = "nixl"
) -> None:
    if peer not in ("nixl", "bare"):
        raise SystemExit(f"PEER={peer}: write nixl or bare")
    tp_sizes = [int(size) for size in tp.split(":")]
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(requests, lengths, tp_sizes, peer, Path(folder)))
    print(f"{'tokens':>7} {'measure':<18} {'tandem':>20} {peer:>20} {'ratio':>20}")
    for length, table in result.items():
        for kind, row in table.items():
            cells = [f"{spread(row.get(side)):>20}" for side in ("tandem", peer, "ratio")]
            print(f"{length:>7} {kind:<18} {' '.join(cells)}")
    name = "promises" if peer == "bare" else "handover"
    name += "" if tp == "1:1" else f"_tp_{tp.replace(':', '_to_')}"
    write(name, {"requests": requests, "tp": tp, "prompt_tokens": result})
