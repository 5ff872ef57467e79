"""Handover and TTFT of Tandem's connector beside a peer, between engines.

The peer is vLLM's NixlConnector, or ``bare``: Tandem without digests, secret and message tags
(``integrity: off``), to measure their cost. Deadlines, leases, numbered messages and counted bytes
cannot be disabled. TP is the tensor-parallel sizes, prefill:decode. In one interleaved run; the
idle arm is stopped (``testing/processes.py``):

ttft      from the client's request to the decode engine's first token. Tandem's legs are sent at
          once; NixlConnector's one after the other, as its protocol requires
handover  from the prefill engine's first token (its last chunk has ended) to the decode engine's
          first token, both stamped in the engine cores with the clock that all processes share
step      one decode step of the same request; the rest of a handover is the connector's
bytes     bytes moved, divided by the bytes that decode needs: every token of full attention, and
          the window of the other groups
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

from prometheus_client import REGISTRY

from benchmarks.engines import ROLES, Side, in_turn, random_prompt, start_arms, start_side, together, transfer_config
from benchmarks.report import ratios, spread, summary, turns, write
from testing.engines import describe
from testing.models import WINDOW_TOKENS, benchmark_gemma3
from testing.trace import read_trace

DECODE_TOKENS = 9
NIXL_FIRST_PORT = 5600
SECRET = "a secret of the benchmark"
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "block_size": 32, "enable_prefix_caching": False}
Samples = dict[str, list[float]]


def ideal_bytes(model: dict[str, int], tokens: int) -> int:
    """Return the bytes of KV that decode needs to continue after ``tokens`` prompt tokens."""
    window = min(tokens, WINDOW_TOKENS)
    return model["token_bytes_a_layer"] * (model["full_layers"] * tokens + model.get("sliding_layers", 0) * window)


def landed_early(events: list[dict[str, Any]]) -> float:
    """Return the share of a transfer's full-attention bytes written before its last chunk ended."""
    blocks: dict[str, int] = next(event for event in events if event["event"] == "receive")["blocks"]
    full = max(blocks, key=lambda group: blocks[group])
    last_chunk_ended = max(event["t"] for event in events if event["event"] == "chunk")
    done = {event["write"]: event["t"] for event in events if event["event"] == "written"}
    writes = [(event["bytes"].get(full, 0), done[event["write"]]) for event in events if event["event"] == "write"]
    return sum(count for count, at in writes if at <= last_chunk_ended) / sum(count for count, _ in writes)


def nixl_bytes() -> float:
    """Return the number of bytes that NixlConnector's metrics report as moved."""
    samples = (sample for metric in REGISTRY.collect() for sample in metric.samples)
    return sum(sample.value for sample in samples if sample.name == "vllm:nixl_bytes_transferred_sum")


async def measure(
    requests: int, lengths: tuple[int, ...], tp_sizes: list[int], peer: str, folder: Path
) -> dict[str, Any]:
    model = benchmark_gemma3(folder / "model")
    traces = {name: folder / f"{name}.jsonl" for name in ("tandem", peer)}

    def start(name: str, role: str) -> Side:
        number = ROLES.index(role)
        proofs = {"integrity": "off"} if name == "bare" else {"integrity": "full", "secret": SECRET}
        settings = {"trace_path": str(traces[name])} | (proofs if peer == "bare" else {})
        transfer = transfer_config(role, "NixlConnector") if name == "nixl" else transfer_config(role, **settings)
        variables = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(NIXL_FIRST_PORT + 10 * number)}
        return start_side(model.path, transfer, None, variables, tp_sizes[number], pinned=False, **ENGINE)

    dice = random.Random(0)
    samples: dict[tuple[int, str], Samples] = defaultdict(lambda: defaultdict(list))
    addresses = {}
    with ExitStack() as stack:
        # NixlConnector's decode engine last: each engine unregisters the metrics of earlier ones,
        # and `nixl_bytes` reads that engine's.
        arms = start_arms(stack, traces, start, ROLES)
        for name in traces.keys() - {"nixl"}:
            with arms[name].awake():
                addresses[name] = await describe(arms[name].prefill)
        for length, name, counted in turns(list(arms), requests, lengths, warm_up=2):
            arm, address, trace = arms[name], addresses.get(name), traces[name]
            prompt = random_prompt(dice, length)
            with arm.awake():
                seen, before = trace.stat().st_size if address else 0, nixl_bytes()
                started = time.monotonic()
                sent = together(arm, address, prompt, DECODE_TOKENS) if address else in_turn(arm, prompt, DECODE_TOKENS)
                prefill, decode = await sent
                await asyncio.sleep(0.2)
                events = read_trace(trace, seen) if address else []
                moved = nixl_bytes() - before
                if address:
                    moved = sum(sum(event["bytes"].values()) for event in events if event["event"] == "write")
            first, last = prefill.output.metrics, decode.output.metrics
            assert first is not None
            assert last is not None
            handover_ms = 1e3 * (last.first_token_ts - first.first_token_ts)
            step_ms = 1e3 * (last.last_token_ts - last.first_token_ts) / (DECODE_TOKENS - 1)
            values = {"ttft_ms": 1e3 * (decode.first_token_at - started), "handover_ms": handover_ms}
            values |= {"step_ms": step_ms, "beyond_step_ms": handover_ms - step_ms}
            values["moved_over_ideal"] = moved / ideal_bytes(model.shape, length - 1)
            if name == "tandem":
                values["landed_early"] = landed_early(events)
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
