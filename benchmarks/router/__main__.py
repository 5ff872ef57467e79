"""Cost of a router, in one interleaved run with engines that compute nothing.

    python -m benchmarks.router [--rounds 7] [--vllm-router build/vllm-router/bin/vllm-router]
        [--routers 2]

direct        one engine over HTTP, without a router or a prefill leg
tandem        this service as deployed, with instant engines in its actors: decode calls prefill.
              With several routers, the kernel assigns each connection to one of them
tandem-proxy  the same service through Ray Serve's HTTP proxy
vllm-router   vLLM's router (Rust) in its prefill/decode mode: two HTTP requests, one after the
              other
proxy         a plain Python proxy (FastAPI, httpx) that does the same

For each number of clients and prompt size: the time to the first token beyond direct's, requests
per second, and the processor time per request in all of an arm's processes. For streams with a
token every few milliseconds: the time from a token's creation in the engine to its arrival, and
processor time per token. Every round measures all arms in turn. Differences and ratios are within a
round, given as median and quartiles. p99 is over the requests of all rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from benchmarks.report import summary, write
from benchmarks.router.arms import Arm, begin, lead
from benchmarks.router.load import Load, body, play

SIZES = (200, 16_000, 220_000)
CLIENTS = {1: 30, 8: 64, 64: 192}
"""Requests of a round, by concurrency."""

ANSWER_TOKENS = 8


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
    """One arm's share of a round in one cell."""

    load: Load
    cpu_s: float

    @property
    def first_ms(self) -> list[float]:
        return [1e3 * stream.first_s for stream in self.load.streams]

    @property
    def relayed_ms(self) -> list[float]:
        """Delays of all tokens but a stream's first, which waits for the response's headers as
        well.
        """
        return [1e3 * one for stream in self.load.streams for one in stream.relayed_s[1:]]

    @property
    def tokens(self) -> int:
        return sum(len(stream.relayed_s) for stream in self.load.streams)


Cells = dict[str, dict[str, list[Batch]]]
"""Batches by cell, then by arm: one for each round."""


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
    for number in range(-1, rounds):
        for cell, data, tokens, clients, count in work:
            for name in lead(list(arms), number):
                # New connections for each batch: the connections of one arm must not affect the
                # next one.
                async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
                    try:
                        await play(session, arms[name].url, data, tokens, clients, clients)
                        before_s = arms[name].cpu_s()
                        load = await play(session, arms[name].url, data, tokens, clients, count)
                    except (ValueError, OSError, aiohttp.ClientError) as error:
                        raise RuntimeError(f"arm {name}, {cell}, round {number + 1}: {error!r}") from error
                    batch = Batch(load, arms[name].cpu_s() - before_s)
                if number >= 0:
                    cells[cell][name].append(batch)
        print(f"round {number + 1} of {rounds}", flush=True)
    return cells


def p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def flat(lists: list[list[float]]) -> list[float]:
    return [one for each in lists for one in each]


def report(cells: Cells) -> dict[str, Any]:
    """Return the results by cell and arm; `added` is relative to direct in the same round."""
    return {
        cell: {
            name: (_tokens if cell.startswith("tokens") else _requests)(batches, by_arm["direct"])
            for name, batches in by_arm.items()
        }
        for cell, by_arm in cells.items()
    }


def _added(times_ms: list[list[float]], direct_ms: list[list[float]]) -> dict[str, Any]:
    """Return an arm's times beyond direct's, in milliseconds: medians of each round, p99 of all."""
    pairs = zip(times_ms, direct_ms, strict=True)
    return {
        "added_p50_ms": summary([statistics.median(one) - statistics.median(other) for one, other in pairs]),
        "added_p99_ms": p99(flat(times_ms)) - p99(flat(direct_ms)),
    }


def _requests(batches: list[Batch], direct: list[Batch]) -> dict[str, Any]:
    pairs = zip(batches, direct, strict=True)
    return {
        "first_token_ms": summary(flat([one.first_ms for one in batches])),
        **_added([one.first_ms for one in batches], [one.first_ms for one in direct]),
        "requests_per_s": summary([one.load.per_second for one in batches]),
        "requests_per_s_over_direct": summary([one.load.per_second / other.load.per_second for one, other in pairs]),
        "cpu_ms_per_request": summary([1e3 * one.cpu_s / len(one.load.streams) for one in batches]),
    }


def _tokens(batches: list[Batch], direct: list[Batch]) -> dict[str, Any]:
    return {
        "relayed_ms": summary(flat([one.relayed_ms for one in batches])),
        **_added([one.relayed_ms for one in batches], [one.relayed_ms for one in direct]),
        "cpu_us_per_token": summary([1e6 * one.cpu_s / one.tokens for one in batches]),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{'':28} {'':12} {'added p50 ms':>22} {'p99 ms':>9} {'a second, of direct':>20} {'cpu':>12}"]
    for cell, by_arm in result.items():
        for name, row in by_arm.items():
            added = row["added_p50_ms"]
            spread = f"{added['median']:.2f} ({added['q1']:.2f}-{added['q3']:.2f})"
            if "requests_per_s" in row:
                share = f"{row['requests_per_s_over_direct']['median']:.3f}"
                cpu = f"{row['cpu_ms_per_request']['median']:.2f} ms"
            else:
                share, cpu = "", f"{row['cpu_us_per_token']['median']:.0f} us"
            lines.append(f"{cell:28} {name:12} {spread:>22} {row['added_p99_ms']:>9.2f} {share:>20} {cpu:>12}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vllm-router", type=Path, help="command of vLLM's router; unset: measure the other arms")
    parser.add_argument("--routers", type=int, default=1, help="number of Tandem's routers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        arms = begin(stack, Path(folder), given.vllm_router, given.routers)
        result = report(uvloop.run(measure(arms, given.rounds)))
    print(table(result))
    streams = {clients: asdict(each) for clients, each in STREAMS.items()}
    document = {"rounds": given.rounds, "requests": CLIENTS, "streams": streams, "cells": result}
    name = "router" if given.routers == 1 else f"router_{given.routers}"
    print("written to", write(name, document | {"routers": given.routers}))


if __name__ == "__main__":
    main()
