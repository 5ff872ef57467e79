"""Cost of a router, in one interleaved run with engines that compute nothing.

direct        one engine over HTTP, without a router or a prefill leg
tandem        this service as deployed, with instant engines in its actors: decode calls prefill.
              With several ROUTERS, the kernel assigns each connection to one of them
tandem-proxy  the same service through Ray Serve's HTTP proxy
vllm-router   vLLM's router (Rust) in its prefill/decode mode: two HTTP requests, one after the
              other; VLLM_ROUTER is its command
proxy         a plain Python proxy (`testing/sequential_proxy.py`) that does the same

For each number of clients and prompt size: the time to the first token beyond direct's, requests
per second, and the processor time per request in all of an arm's processes. For streams with a
token every few milliseconds: the time from a token's creation in the engine to its arrival, and
processor time per token. Every round measures all arms in turn. Differences and ratios are within a
round, given as median and quartiles. p99 is over the requests of all rounds. `idle` is the
processor time that an arm's processes use in a second without requests (Ray's, for the most part);
times per request and token include it.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.report import p99, spread, summary, turns, write
from benchmarks.router.arms import Arm, begin
from benchmarks.router.load import Load, body, play

SIZES = (200, 16_000, 220_000)
CLIENTS = {1: 30, 8: 64, 64: 192}
"""Requests of a round, by concurrency."""

ANSWER_TOKENS = 8
IDLE_S = 20.0


@dataclass(frozen=True)
class Streams:
    """Streams of a round: their number, tokens of each, and milliseconds between engine steps."""

    count: int
    tokens: int
    pace_ms: float


STREAMS = {1: Streams(2, 200, 5.0), 8: Streams(8, 200, 5.0), 64: Streams(64, 100, 20.0)}
"""Streams of a round, by concurrency. Two cores cannot relay 64 streams with a step every 5 ms."""


@dataclass(frozen=True)
class Batch:
    """One arm's share of a round in one cell; ``paced`` if it measures tokens, not requests."""

    paced: bool
    load: Load
    cpu_s: float

    @property
    def times_ms(self) -> list[float]:
        """Times to the first token; of streams the delays of all tokens but a stream's first, which
        waits for the response's headers as well.
        """
        if self.paced:
            return [1e3 * one for stream in self.load.streams for one in stream.relayed_s[1:]]
        return [1e3 * stream.first_s for stream in self.load.streams]


Cells = dict[str, dict[str, list[Batch]]]
"""Batches by cell, then by arm: one for each round."""


async def idle_ms_per_s(arms: dict[str, Arm]) -> dict[str, float]:
    before = {name: arm.cpu_s() for name, arm in arms.items()}
    await asyncio.sleep(IDLE_S)
    return {name: 1e3 * (arm.cpu_s() - before[name]) / IDLE_S for name, arm in arms.items()}


async def measure(arms: dict[str, Arm], rounds: int) -> Cells:
    cells: Cells = defaultdict(lambda: defaultdict(list))
    work = [
        (f"{size} bytes, {clients} at a time", body(size, ANSWER_TOKENS), ANSWER_TOKENS, clients, count)
        for size in SIZES
        for clients, count in CLIENTS.items()
    ]
    work += [
        (f"tokens, {clients} at a time", body(SIZES[0], each.tokens, each.pace_ms), each.tokens, clients, each.count)
        for clients, each in STREAMS.items()
    ]
    timeout = aiohttp.ClientTimeout(total=120)
    for (cell, data, tokens, clients, count), name, counted in turns(list(arms), rounds, work):
        # New connections for each batch: those of one arm must not affect the next one.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            try:
                await play(session, arms[name].url, data, tokens, clients, clients)
                before_s = arms[name].cpu_s()
                load = await play(session, arms[name].url, data, tokens, clients, count)
                cpu_s = arms[name].cpu_s() - before_s
            except (ValueError, OSError, aiohttp.ClientError) as error:
                raise RuntimeError(f"arm {name}, {cell}: {error!r}") from error
        if counted:
            cells[cell][name].append(Batch(cell.startswith("tokens"), load, cpu_s))
    return cells


def report(batches: list[Batch], direct: list[Batch]) -> dict[str, Any]:
    """Return an arm's results in a cell; `added` is relative to direct in the same round."""
    pairs = list(zip(batches, direct, strict=True))
    every, direct_every = ([time for one in each for time in one.times_ms] for each in (batches, direct))
    added = [statistics.median(one.times_ms) - statistics.median(other.times_ms) for one, other in pairs]
    row = {
        "relayed_ms" if batches[0].paced else "first_token_ms": summary(every),
        "added_p50_ms": summary(added),
        "added_p99_ms": p99(every) - p99(direct_every),
    }
    if batches[0].paced:
        tokens = [sum(len(stream.relayed_s) for stream in one.load.streams) for one in batches]
        row["cpu_us_per_token"] = summary([1e6 * one.cpu_s / count for one, count in zip(batches, tokens, strict=True)])
    else:
        row["requests_per_s"] = summary([one.load.per_second for one in batches])
        shares = [one.load.per_second / other.load.per_second for one, other in pairs]
        row["requests_per_s_over_direct"] = summary(shares)
        row["cpu_ms_per_request"] = summary([1e3 * one.cpu_s / len(one.load.streams) for one in batches])
    return row


def table(result: dict[str, dict[str, dict[str, Any]]]) -> str:
    lines = [f"{'':28} {'':12} {'added p50 ms':>22} {'p99 ms':>9} {'a second, of direct':>20} {'cpu':>12}"]
    for cell, by_arm in result.items():
        for name, row in by_arm.items():
            if "requests_per_s" in row:
                share = f"{row['requests_per_s_over_direct']['median']:.3f}"
                cpu = f"{row['cpu_ms_per_request']['median']:.2f} ms"
            else:
                share, cpu = "", f"{row['cpu_us_per_token']['median']:.0f} us"
            added = spread(row["added_p50_ms"])
            lines.append(f"{cell:28} {name:12} {added:>22} {row['added_p99_ms']:>9.2f} {share:>20} {cpu:>12}")
    return "\n".join(lines)


def main(*, rounds: int = 7, routers: int = 1, vllm_router: str = "") -> None:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arms = begin(stack, Path(folder), vllm_router, routers)
        idle = uvloop.run(idle_ms_per_s(arms))
        cells = uvloop.run(measure(arms, rounds))
    result = {
        cell: {name: report(batches, by_arm["direct"]) for name, batches in sorted(by_arm.items())}
        for cell, by_arm in cells.items()
    }
    print(table(result))
    print("idle, ms of processor time a second:", {name: round(each) for name, each in idle.items()})
    streams = {clients: asdict(each) for clients, each in STREAMS.items()}
    document = {"rounds": rounds, "requests": CLIENTS, "streams": streams, "cells": result, "routers": routers}
    document["idle_ms_per_s"] = idle
    write("router" if routers == 1 else f"router_{routers}", document)
