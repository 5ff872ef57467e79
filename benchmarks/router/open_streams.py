"""Thousands of streams that are open at the same time on one router: memory per stream, and its
growth.

Tandem's service with instant engines, over HTTP. Client processes open the streams; each stream
receives a token every PACE_S seconds and ends after the last minute. The engines have more
slots than streams (`max_ongoing_sequences`), and all processes may open as many files as the hard
limit permits. Measured before the first stream, with all streams open, after each minute, and after
the last stream: resident memory of the router and both engines.

The exit status is 0 if

- every stream took the remote route and received each token and its end, and all were open at every
  measurement
- the resident memory of each actor grew at most by the factor `FLAT` while all streams were open
- a stream costs the router at most `MOST_ROUTER_KB`, and the decode engine's actor at most
  `MOST_ENGINE_KB`
- nothing runs or is held afterwards
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import resource
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.report import failed, p99, write
from benchmarks.router.disconnects import counted, processes, settled
from benchmarks.router.load import DATA, age_s, body, raw
from benchmarks.router.service import application, running
from testing.ports import free_port

PROMPT_BYTES = 200
CLIENT_PROCESSES = 4
OPENING = 16
"""Streams that one client process opens at a time."""

OPENED_PER_S = 25.0
"""Lowest expected rate at which streams open, to compute their lengths."""

SPARE_FILES = 1000
SPARE_SLOTS = 64
"""Slots of calls whose end an engine has not seen yet."""

FLAT = 1.05
MOST_ROUTER_KB = 100.0
MOST_ENGINE_KB = 100.0


@dataclass
class Counts:
    """State of the streams of one client process, or of all."""

    open: int = 0
    ended: int = 0
    tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    delays_ms: list[float] = field(default_factory=list)
    """Delays from the creation of each token to its arrival, since the last report."""

    def add(self, other: Counts) -> None:
        self.open += other.open
        self.ended += other.ended
        self.tokens += other.tokens
        self.failures += other.failures
        self.delays_ms += other.delays_ms


async def stream(port: int, wanted: int, pace_s: float, counts: Counts, opened: asyncio.Event) -> None:
    """Read one stream of `wanted` tokens on its own connection to its end, and count it."""
    tokens = 0
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw(port, body(PROMPT_BYTES, wanted, 1e3 * pace_s)))
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200 "):
            raise ValueError(f"unexpected response: {head[:300]!r}")
        while b"data: [DONE]" not in (event := await reader.readuntil(b"\n\n")):
            if DATA in event:
                counts.delays_ms.append(1e3 * age_s(event, time.monotonic_ns()))
                counts.tokens += 1
                counts.open += not tokens
                tokens += 1
                opened.set()
        if tokens != wanted:
            raise ValueError(f"{tokens} of {wanted} tokens at the end")
        writer.close()
    except (OSError, EOFError, ValueError) as error:
        counts.failures[f"{error!r} after {tokens} of {wanted} tokens"] += 1
    counts.open -= bool(tokens)
    counts.ended += 1
    opened.set()


def client(port: int, streams: int, pace_s: float, reports: Connection) -> None:
    """Open `streams` streams, all of which end at one time; answer requests for a report.

    Sends True once it runs. Receives the monotonic time of the streams' end, then sends a `Counts`
    for each message; ends with None.
    """
    reports.send(True)
    until = reports.recv()
    counts = Counts()

    async def run() -> None:
        left, opened_all = iter(range(streams)), set()

        async def open_some() -> None:
            for _ in left:
                wanted, opened = max(math.ceil((until - time.monotonic()) / pace_s), 1), asyncio.Event()
                opened_all.add(asyncio.create_task(stream(port, wanted, pace_s, counts, opened)))
                await opened.wait()

        opening = [asyncio.create_task(open_some()) for _ in range(OPENING)]
        while await asyncio.to_thread(reports.recv):
            reports.send(counts)
            counts.delays_ms = []
        for one in (*opening, *opened_all):
            one.cancel()

    uvloop.run(run())


class Clients:
    """The client processes."""

    def __init__(self, port: int, streams: int, pace_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for number in range(CLIENT_PROCESSES):
            share = streams // CLIENT_PROCESSES + (number < streams % CLIENT_PROCESSES)
            here, there = context.Pipe()
            process = context.Process(target=client, args=(port, share, pace_s, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def begin(self, until: float) -> None:
        """Open the streams, which end at the monotonic time `until`."""
        for pipe in self._pipes:
            pipe.send(until)

    def counts(self) -> Counts:
        """Return the sum of the processes' counts."""
        for pipe in self._pipes:
            pipe.send(True)
        total = Counts()
        for pipe in self._pipes:
            total.add(pipe.recv())
        return total

    def close(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


def raise_file_limit(streams: int) -> None:
    """Raise the limit of open files for this process and its children.

    Raises SystemExit if the hard limit is too low.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < streams + SPARE_FILES:
        raise SystemExit(f"the hard limit of open files is {hard}; set it to {streams + SPARE_FILES} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(*, streams: int = 10_000, minutes: int = 10, pace_s: float = 20.0) -> int:
    raise_file_limit(streams)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    rows: list[dict[str, Any]] = []
    with running(port, None, application(port, streams + SPARE_SLOTS)):
        found = processes()

        def measure(when: str, counts: Counts) -> None:
            delays = counts.delays_ms if len(counts.delays_ms) > 1 else [0.0, 0.0]
            row = {"when": when, "open": counts.open, "ended": counts.ended, "tokens": counts.tokens}
            row |= {"failures": counts.failures.total()}
            row["rss_mb"] = {name: process.memory_info().rss / 1e6 for name, process in found.items()}
            row["cpu_s"] = {name: sum(process.cpu_times()[:2]) for name, process in found.items()}
            row["delay_ms"] = statistics.median(delays), p99(delays), max(delays)
            rows.append(row)
            memory = ", ".join(f"{name} {value:.1f}" for name, value in row["rss_mb"].items())
            print(
                f"{when:>14}: {counts.open:6d} open, {counts.tokens:8d} tokens, {row['failures']} failed; MB: {memory};"
                " delay of a token {:.1f} ms, p99 {:.0f}, longest {:.0f}".format(*row["delay_ms"]),
                flush=True,
            )
            for failure, count in counts.failures.most_common(3):
                print(f"{'':>14}  {count} x {failure}", flush=True)

        clients = Clients(port, streams, pace_s)
        measure("before", Counts())
        began = time.monotonic()
        opening_s = streams / OPENED_PER_S
        until = began + opening_s + 60 * minutes + 2 * pace_s
        clients.begin(until)
        while (counts := clients.counts()).open < streams and not counts.ended:
            if time.monotonic() - began > opening_s:
                break
            time.sleep(1)
        opened_s = time.monotonic() - began
        # The router's memory may still grow for a minute: garbage of the openings.
        measure("all open", counts)
        full = time.monotonic()
        for minute in range(1, minutes + 1):
            time.sleep(max(full + 60 * minute - time.monotonic(), 0))
            measure(f"{minute} min", clients.counts())
        while (counts := clients.counts()).ended < streams and time.monotonic() < until + 60:
            time.sleep(1)
        left, routes = settled(url), counted(url)
        measure("after", counts)
        clients.close()
    before, first, last = rows[0], rows[1], rows[-2]
    print(f"{streams} streams opened in {opened_s:.0f} s; a token every {pace_s:g} s; left afterwards: {left}")
    document: dict[str, Any] = {"streams": streams, "pace_s": pace_s, "opened_s": opened_s}
    document |= {"kb_per_stream": {}, "growth": {}, "cpu_us_per_token": {}, "left": left, "rows": rows}
    for name in found:
        mb = [row["rss_mb"][name] for row in (before, first, last)]
        cpu_s, tokens = last["cpu_s"][name] - first["cpu_s"][name], max(last["tokens"] - first["tokens"], 1)
        kb, growth, cpu_us = 1e3 * (mb[1] - mb[0]) / streams, mb[2] / mb[1], 1e6 * cpu_s / tokens
        for what, value in (("kb_per_stream", kb), ("growth", growth), ("cpu_us_per_token", cpu_us)):
            document[what][name] = value
        print(f"{name:8} {kb:6.1f} KB per stream, memory x {growth:.3f} in {minutes} min, {cpu_us:.0f} us per token")
    write("open_streams", document)
    kb_per_stream = document["kb_per_stream"]
    return failed(
        {
            "not all streams are open at each measurement": any(row["open"] != streams for row in rows[1:-1]),
            "streams failed or did not end": bool(counts.failures) or counts.ended != streams,
            f"not all requests took the remote route: {routes}": routes.get("remote") != streams,
            f"memory grows by more than x {FLAT}": any(value > FLAT for value in document["growth"].values()),
            f"a stream costs the router more than {MOST_ROUTER_KB} KB": kb_per_stream["Router"] > MOST_ROUTER_KB,
            f"a stream costs decode more than {MOST_ENGINE_KB} KB": kb_per_stream["Decode"] > MOST_ENGINE_KB,
            "something is left": any(left.values()),
        }
    )
