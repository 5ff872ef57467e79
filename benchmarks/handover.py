"""Handover and TTFT of Tandem's connector beside a peer, between engines.

    python -m benchmarks.handover [--requests 12] [--lengths 200,1000,2000] [--tp 1:2] [--peer bare]

The peer is vLLM's NixlConnector, or ``bare``: Tandem without digests, secret and message tags
(``integrity: off``), to measure their cost. Deadlines, leases, numbered messages and counted bytes
cannot be disabled. In one interleaved run; the idle arm is stopped (``testing/processes.py``):

ttft      from the client's request to the decode engine's first token. Tandem's legs are sent at
          once; NixlConnector's one after the other, as its protocol requires
handover  from the prefill engine's first token (its last chunk has ended) to the decode engine's
          first token, both stamped in the engine cores with the clock that all processes share
step      one decode step of the same request; the rest of a handover is the connector's
bytes     bytes moved, divided by the bytes that decode needs: every token of full attention, and
          the window of the other groups
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig

from benchmarks.report import ratios, summary, write
from testing.engines import describe, start_engine
from testing.legs import Leg, leg
from testing.models import VOCABULARY, WINDOW_TOKENS, benchmark_gemma3
from testing.processes import Arm, children, free_cores
from testing.sequential_proxy import PRODUCE
from testing.trace import read_trace
from testing.transfer_bytes import nixl_bytes, written_bytes

DECODE_TOKENS = 9
NIXL_FIRST_PORT = 5600
SECRET = "a secret of the benchmark"
ENGINE: dict[str, Any] = {"max_num_batched_tokens": 256, "block_size": 32, "enable_prefix_caching": False}


@dataclass
class Samples:
    ttft_ms: list[float] = field(default_factory=list)
    handover_ms: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    moved_over_ideal: list[float] = field(default_factory=list)
    landed_early: list[float] = field(default_factory=list)

    @property
    def beyond_step_ms(self) -> list[float]:
        return [handover - step for handover, step in zip(self.handover_ms, self.step_ms, strict=True)]


async def tandem(arm: Arm, address: dict[str, Any], prompt: list[int], tokens: int = DECODE_TOKENS) -> tuple[Leg, Leg]:
    """Send both legs at once."""
    transfer_id = uuid.uuid4().hex
    produce = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    prefill, decode = await asyncio.gather(
        leg(arm.prefill, prompt, 1, produce),
        leg(arm.decode, prompt, tokens, address | {"transfer_id": transfer_id}),
    )
    return prefill, decode


async def in_turn(arm: Arm, prompt: list[int], tokens: int = DECODE_TOKENS) -> tuple[Leg, Leg]:
    prefill = await leg(arm.prefill, prompt, 1, PRODUCE)
    assert prefill.output.kv_transfer_params is not None
    return prefill, await leg(arm.decode, prompt, tokens, prefill.output.kv_transfer_params)


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


def start_arm(
    name: str, model: str, tp_sizes: tuple[int, int], transfers: tuple[KVTransferConfig, KVTransferConfig]
) -> Arm:
    before = children()
    engines = []
    for number, (tp_size, transfer) in enumerate(zip(tp_sizes, transfers, strict=True)):
        os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(NIXL_FIRST_PORT + 10 * number)
        engines.append(start_engine(model, tp_size, None, kv_transfer_config=transfer, **ENGINE))
    pids = sorted(children() - before)
    free_cores(pids)
    return Arm(pids, name, *engines)


def transfers(name: str, trace: Path, peer: str) -> tuple[KVTransferConfig, KVTransferConfig]:
    """Return the configurations of an arm's prefill and decode engine."""
    if name == "nixl":
        options: dict[str, Any] = {"kv_connector": "NixlConnector"}
    else:
        proofs = {"integrity": "off"} if name == "bare" else {"integrity": "full", "secret": SECRET}
        settings = {"trace_path": str(trace)} | (proofs if peer == "bare" else {})
        options = {"kv_connector": "TandemConnector", "kv_connector_module_path": "connectors.vllm_hma.connector"}
        options["kv_connector_extra_config"] = settings
    prefill, decode = (
        KVTransferConfig(kv_role=role, kv_load_failure_policy="recompute", **options)
        for role in ("kv_producer", "kv_consumer")
    )
    return prefill, decode


async def measure(
    requests: int, lengths: list[int], tp_sizes: tuple[int, int], peer: str, folder: Path
) -> dict[str, Any]:
    model = benchmark_gemma3(folder / "model")
    traces = {name: folder / f"{name}.jsonl" for name in ("tandem", peer)}
    addresses, arms = {}, []
    try:
        for name, trace in traces.items():
            arms.append(start_arm(name, model.path, tp_sizes, transfers(name, trace, peer)))
            if name != "nixl":
                addresses[name] = await describe(arms[-1].prefill)
        rng = random.Random(0)
        samples = {length: {name: Samples() for name in traces} for length in lengths}
        for arm in arms:
            arm.sleep()
        rounds = [(n, length) for n in range(-2, requests) for length in lengths]
        for number, length in rounds:
            prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
            for arm in arms if (number + length) % 2 else arms[::-1]:
                address, trace = addresses.get(arm.name), traces[arm.name]
                with arm.awake():
                    seen, before = trace.stat().st_size if address else 0, nixl_bytes()
                    started = time.monotonic()
                    run = tandem(arm, address, prompt) if address else in_turn(arm, prompt)
                    prefill, decode = await asyncio.wait_for(run, 120)
                    await asyncio.sleep(0.2)
                    events = read_trace(trace, seen) if address else []
                    moved = written_bytes(events) if address else nixl_bytes() - before
                if number < 0:
                    continue
                first, last = prefill.output.metrics, decode.output.metrics
                assert first is not None
                assert last is not None
                sample = samples[length][arm.name]
                sample.ttft_ms.append(1e3 * (decode.first_token_at - started))
                sample.handover_ms.append(1e3 * (last.first_token_ts - first.first_token_ts))
                sample.step_ms.append(1e3 * (last.last_token_ts - last.first_token_ts) / (DECODE_TOKENS - 1))
                sample.moved_over_ideal.append(moved / ideal_bytes(model.shape, length - 1))
                if arm.name == "tandem":
                    sample.landed_early.append(landed_early(events))
    finally:
        for arm in arms:
            arm.shutdown()
    return {str(length): _compare(both["tandem"], both[peer], peer) for length, both in samples.items()}


def _compare(tandem: Samples, other: Samples, peer: str) -> dict[str, Any]:
    kinds = ("ttft_ms", "handover_ms", "step_ms", "beyond_step_ms", "moved_over_ideal")
    table: dict[str, Any] = {
        kind: {"tandem": summary(getattr(tandem, kind)), peer: summary(getattr(other, kind))} for kind in kinds
    }
    table["landed_early"] = {"tandem": summary(tandem.landed_early)}
    for kind in ("ttft_ms", "handover_ms", "beyond_step_ms"):
        table[kind]["ratio"] = ratios(getattr(tandem, kind), getattr(other, kind))
    return table


def _cell(side: dict[str, float] | None) -> str:
    return f"{side['median']:.2f} ({side['q1']:.2f}-{side['q3']:.2f})" if side else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12, help="measured requests per length and connector")
    parser.add_argument("--lengths", default="200,1000,2000", help="prompt tokens")
    parser.add_argument("--tp", default="1:1", help="prefill:decode tensor-parallel sizes")
    parser.add_argument("--peer", choices=("nixl", "bare"), default="nixl")
    arguments = parser.parse_args()
    prefill_tp, decode_tp = (int(size) for size in arguments.tp.split(":"))
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(
            measure(arguments.requests, lengths, (prefill_tp, decode_tp), arguments.peer, Path(folder))
        )
    print(f"{'tokens':>7} {'measure':<18} {'tandem':>20} {arguments.peer:>20} {'ratio':>20}")
    for length, table in result.items():
        for kind, row in table.items():
            ours, theirs = (_cell(row.get(side)) for side in ("tandem", arguments.peer))
            r = row.get("ratio")
            ratio = f"{r['of_medians']:.2f} ({r['q1']:.2f}-{r['q3']:.2f})" if r else ""
            print(f"{length:>7} {kind:<18} {ours:>20} {theirs:>20} {ratio:>20}")
    name = "promises" if arguments.peer == "bare" else "handover"
    name += "" if arguments.tp == "1:1" else f"_tp_{prefill_tp}_to_{decode_tp}"
    print("written to", write(name, {"requests": arguments.requests, "tp": arguments.tp, "prompt_tokens": result}))


if __name__ == "__main__":
    main()
