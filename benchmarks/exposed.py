"""Exposed part of a transfer: bytes that arrive after the producer's last chunk, and the TTFT.

    python -m benchmarks.exposed [--requests 8] [--rate 400mbit]

Three modes of sending, interleaved request by request, between one decode engine and two prefill
engines that differ only in ``streaming``: ``whole`` (decode requests KV after the end of prefill),
``chunk`` and ``layer``. Once over shared memory, and once over TCP between two network namespaces
with a rate limit (needs root).

Decode runs on the last core and prefill on the others, as on separate hosts: an engine whose
request waits for KV steps without pause, which would slow prefill down in the two modes that
request KV early.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM

from benchmarks.namespace import Namespace, namespace
from benchmarks.report import ratios, summary, write
from testing.engines import describe, start_engine
from testing.legs import leg
from testing.models import VOCABULARY, benchmark_gemma3
from testing.processes import children, environment, own_cores, pin
from testing.trace import read_trace

CHUNK_TOKENS = 256
LENGTHS = {1: 250, 2: 500, 8: 2000}
"""Prompt tokens, by number of chunks."""
WAYS = ("whole", "chunk", "layer")
ENGINE: dict[str, Any] = {"max_num_batched_tokens": CHUNK_TOKENS, "enable_prefix_caching": False}


@dataclass(frozen=True)
class Sample:
    """One measurement.

    ``exposed_ms``  from the end of the last chunk to the last byte
    ``after``       share of bytes in that time
    """

    ttft_ms: float
    exposed_ms: float
    after: float


@dataclass
class Bench:
    """Engines of one link, the prefill engines by mode; ``whole`` shares that of ``chunk``."""

    decode: AsyncLLM
    prefills: dict[str, AsyncLLM]
    addresses: dict[str, dict[str, Any]]
    traces: dict[str, Path]

    async def ask(self, way: str, prompt: list[int]) -> Sample:
        arm = "chunk" if way == "whole" else way
        seen = self.traces[arm].stat().st_size
        transfer_id = uuid.uuid4().hex
        produce = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
        consume = self.addresses[arm] | {"transfer_id": transfer_id}
        started_at = time.monotonic()
        prefill = asyncio.ensure_future(leg(self.prefills[arm], prompt, 1, produce))
        if way == "whole":
            await prefill
        decode = await leg(self.decode, prompt, 2, consume)
        await prefill
        return _sample(read_trace(self.traces[arm], seen), (decode.first_token_at - started_at) * 1e3)

    def shutdown(self) -> None:
        for engine in (self.decode, *self.prefills.values()):
            engine.shutdown()


def _sample(events: list[dict[str, Any]], ttft_ms: float) -> Sample:
    ended_at = max(event["t"] for event in events if event["event"] == "chunk")
    done = {event["write"]: event["t"] for event in events if event["event"] == "written"}
    sizes = {event["write"]: sum(event["bytes"].values()) for event in events if event["event"] == "write"}
    after = sum(size for number, size in sizes.items() if done[number] > ended_at)
    return Sample(ttft_ms, max(0.0, max(done.values()) - ended_at) * 1e3, after / sum(sizes.values()))


async def start(model: str, folder: Path, link: str, prefill_host: Namespace | None) -> Bench:
    """Start prefill engines in ``prefill_host`` and decode outside it; use TCP if there is one."""
    host = {"side_channel_host": prefill_host.address} if prefill_host else {}
    with environment({"UCX_TLS": "tcp,self"} if prefill_host else {}):
        here = {"side_channel_host": prefill_host.outside} if prefill_host else {}
        decode = start_engine(model, 1, "kv_consumer", transfer=here, **ENGINE)
        decoding = children()
        prefills, addresses, traces = {}, {}, {}
        for way in ("chunk", "layer"):
            traces[way] = folder / f"{link}-{way}.jsonl"
            transfer = {"streaming": way, "trace_path": str(traces[way]), **host}
            with prefill_host.entered() if prefill_host else contextlib.nullcontext():
                prefills[way] = start_engine(model, 1, "kv_producer", transfer=transfer, **ENGINE)
            addresses[way] = await describe(prefills[way])
    cores = own_cores()
    pin(decoding, cores[-1:])
    pin(children() - decoding, cores[:-1] or cores)
    return Bench(decode, prefills, addresses, traces)


async def measure(bench: Bench, requests: int) -> dict[str, Any]:
    rng = random.Random(0)
    found: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    for number in range(requests + 1):
        for chunks, tokens in LENGTHS.items():
            for way in rng.sample(WAYS, len(WAYS)):
                prompt = [rng.randrange(3, VOCABULARY) for _ in range(tokens)]
                sample = await bench.ask(way, prompt)
                if number:  # the first request of each mode is a warm-up
                    found[chunks, way].append(sample)
    rows = []
    for chunks in LENGTHS:
        row: dict[str, Any] = {"chunks": chunks, "prompt_tokens": LENGTHS[chunks]}
        whole = found[chunks, "whole"]
        for way in WAYS:
            samples = found[chunks, way]
            row[way] = {
                "exposed_ms": summary([sample.exposed_ms for sample in samples]),
                "after": summary([sample.after for sample in samples]),
                "ttft_ms": summary([sample.ttft_ms for sample in samples]),
                "ttft_over_whole": ratios([s.ttft_ms for s in samples], [s.ttft_ms for s in whole]),
            }
        rows.append(row)
    return {"rows": rows}


def show(link: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{link}: medians")
    print("chunks  way     lands after the last chunk   exposed ms   TTFT ms   TTFT / whole (quartiles)")
    for row in rows:
        for way in WAYS:
            one = row[way]
            ratio = one["ttft_over_whole"]
            print(
                f"{row['chunks']:6d}  {way:6s}  {one['after']['median']:24.0%}   {one['exposed_ms']['median']:12.1f}"
                f"   {one['ttft_ms']['median']:7.0f}   {ratio['of_medians']:.2f} ({ratio['q1']:.2f}-{ratio['q3']:.2f})",
                flush=True,
            )


async def run(link: str, model: str, folder: Path, prefill_host: Namespace | None, requests: int) -> dict[str, Any]:
    bench = await start(model, folder, link, prefill_host)
    try:
        result = await measure(bench, requests)
    finally:
        bench.shutdown()
    show(link, result["rows"])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--rate", default="400mbit", help="rate of the link between namespaces; empty: no link")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = benchmark_gemma3(folder / "model").path
        document = {"shared memory": asyncio.run(run("shared memory", model, folder, None, arguments.requests))}
        if arguments.rate:
            with namespace(arguments.rate) as prefill_host:
                link = f"tcp {arguments.rate}"
                document[link] = asyncio.run(run(link, model, folder, prefill_host, arguments.requests))
    print("\nwritten:", write("exposed", document))


if __name__ == "__main__":
    main()
