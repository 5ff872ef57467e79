"""Thousands of requests to the router, half of whose clients disconnect: counters, leaks and
memory.

Tandem's service with instant engines, over HTTP. A client disconnects before its body is complete,
at some time before or during its answer, or after some tokens; or it reads to the end. Afterwards:

- the router has counted every request once, as served or as left; clients that have received a
  part of their answer count as served
- nothing runs or is held: calls in both actors, transfers, slots on either side
- the actors' resident memory at the end is at most FLAT times that at half-time

The exit status is 0 if all of this holds.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil

from app.http.routes import OPEN_AGE_S
from benchmarks.report import failed, write
from benchmarks.router.load import body, raw
from benchmarks.router.service import running
from testing.ports import free_port

TOKENS = 8
PACE_MS = 5.0
CLIENTS = 32
SAMPLES = 40
POLL_S = 1.1
"""Interval between checks for leftovers: a router answers `/tandem/status` from data up to a
second old.
"""

SETTLE_S = 60.0
FLAT = 1.05
"""Highest ratio of an actor's resident memory at the end to that at half-time; more is growth."""

WATCHED = ("Router", "Prefill", "Decode")

READ, HALF, WAITED, SOME = (
    "read its answer",
    "left before its body was whole",
    "left after a while",
    "left after some tokens",
)


@dataclass
class Run:
    """Outcomes of the clients, and the memory during the run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    rss_mb: dict[str, list[float]] = field(default_factory=dict)
    at: list[int] = field(default_factory=list)


async def client(port: int, rng: random.Random, data: bytes) -> str:
    """Send one request on its own connection; return this client's outcome."""
    kind = rng.choices(["reads", "half", "waits", "tokens"], [5, 1, 2, 2])[0]
    request = raw(port, data)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        if kind == "half":
            writer.write(request[: -len(data) // 2])
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            return HALF
        writer.write(request)
        if kind == "waits":
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.0, 0.3)):
                    await reader.read()
            return WAITED
        wanted = rng.randrange(1, TOKENS) if kind == "tokens" else None
        answer = b""
        while some := await reader.read(65536):
            answer += some
            if wanted is not None and answer.count(b"made_ns") >= wanted:
                return SOME
        if not answer.startswith(b"HTTP/1.1 200 ") or answer.count(b"made_ns") != TOKENS or b"[DONE]" not in answer:
            raise ValueError(f"not a whole answer: {answer[:300]!r} ... {answer[-100:]!r}")
        return READ
    finally:
        writer.transport.abort()


async def play(port: int, requests: int, seed: int, found: dict[str, psutil.Process]) -> Run:
    run = Run(rss_mb={name: [] for name in found})
    rng = random.Random(seed)
    bodies = [body(size, TOKENS, PACE_MS) for size in (200, 16_000)]
    left = iter(range(requests))

    async def clients() -> None:
        for number in left:
            if number % max(requests // SAMPLES, 1) == 0:
                run.at.append(number)
                for name, process in found.items():
                    run.rss_mb[name].append(process.memory_info().rss / 1e6)
            run.outcomes[await client(port, rng, rng.choice(bodies))] += 1

    await asyncio.gather(*(clients() for _ in range(CLIENTS)))
    return run


def processes() -> dict[str, psutil.Process]:
    found = {}
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            title = " ".join(process.cmdline())
            for name in WATCHED:
                if re.match(rf"ray::ServeReplica:tandem:{name}\b", title):
                    found[name] = process
    assert found.keys() == set(WATCHED), found
    return found


def counted(url: str) -> dict[str, int]:
    """Return the router's requests by route, its disconnects, and its ongoing requests."""
    found: Counter[str] = Counter()
    time.sleep(OPEN_AGE_S)  # the router returns a cached response for this time
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        sample = re.fullmatch(r"tandem_(requests_total|client_disconnects_total|ongoing_requests)\{(.*)\} (\S+)", line)
        if sample is not None:
            route = re.search(r'route="(\w+)"', sample[2])
            found[route[1] if route is not None else sample[1]] += int(float(sample[3]))
    return dict(found)


def settled(url: str) -> dict[str, Any]:
    """Return the leftovers of the requests: once there are none, or after SETTLE_S."""
    give_up_at = time.monotonic() + SETTLE_S
    while True:
        status = httpx.get(f"{url}/tandem/status", timeout=30).json()
        routers, engines = status["routers"], status["engines"]
        left = {
            "ongoing in the router": counted(url)["ongoing_requests"],
            "calls in the actors": sum(engine["running"] for engine in engines),
            "slots given by the router": sum(sum(one["slots_taken"].values()) for one in routers),
            "slots taken at the engines": sum(engine["ongoing"] for engine in engines),
            "transfers held": sum(engine["held"] for engine in engines),
        }
        if not any(left.values()) or time.monotonic() > give_up_at:
            return left
        time.sleep(POLL_S)


def main(*, requests: int = 10_000, seed: int = 1) -> int:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(port, None):
        began = time.monotonic()
        run = asyncio.run(play(port, requests, seed, processes()))
        took_s = time.monotonic() - began
        left = settled(url)
        total = counted(url)
    disconnects = total.pop("client_disconnects_total", 0)
    total.pop("ongoing_requests")
    served = total.get("remote", 0) + total.get("local", 0)
    half = len(run.at) // 2
    growth = {
        name: statistics.median(values[-5:]) / statistics.median(values[half : half + 5])
        for name, values in run.rss_mb.items()
    }
    print(f"{requests} requests in {took_s:.0f} s; clients: {dict(run.outcomes)}")
    print(f"counted by the router: {total}, {disconnects} of the clients left while it served them")
    print(f"left afterwards: {left}")
    for name, values in run.rss_mb.items():
        print(f"{name:12} {values[0]:.0f} MB at first, {values[half]:.0f} at half-time, {values[-1]:.0f} at the end")
    accounted = (
        sum(total.values()) == requests
        and total.keys() <= {"remote", "local", "left"}
        and run.outcomes[READ] + run.outcomes[SOME] <= served <= requests - run.outcomes[HALF]
    )
    document = {"requests": requests, "seed": seed, "clients": dict(run.outcomes), "counted": total}
    document |= {"disconnects": disconnects, "left": left, "second_half_growth": growth}
    write("disconnects", document | {"rss_mb": {"after_requests": run.at, **run.rss_mb}})
    return failed(
        {
            "memory grows": any(grown >= FLAT for grown in growth.values()),
            "not every request is counted once": not accounted,
            "requests left something behind": any(left.values()),
        }
    )
