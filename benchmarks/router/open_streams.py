"""Thousands of streams that are open at the same time on one router: memory per stream, and its
growth.

    python -m benchmarks.router.open_streams [--streams 10000] [--minutes 10] [--pace-s 20]

Tandem's service with instant engines, over HTTP. Client processes open the streams; each stream
receives a token every `--pace-s` seconds and ends after the last minute. The engines have more
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

import argparse
import asyncio
import math
import multiprocessing
import resource
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks.report import write
from benchmarks.router.disconnects import counted, processes, settled
from benchmarks.router.load import DATA, MADE, body, raw
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


class Stream(asyncio.Protocol):
    """One request on its own connection; counts its tokens and reports its failure."""

    __slots__ = ("_counted", "_head", "_rest", "_tokens", "_transport", "_wanted", "began", "opened")

    def __init__(self, counted: Counts, wanted: int) -> None:
        self._counted = counted
        self._wanted = wanted
        self._tokens = 0
        self._rest = b""
        self._head: bytes | None = b""
        self._transport: Any = None
        self.began = time.monotonic()
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; asyncio's hook."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Count the tokens of complete events; asyncio's hook."""
        if self._head is not None:
            self._head += data
            if b"\r\n\r\n" not in self._head:
                return
            head, _, data = self._head.partition(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                self._end(f"unexpected response: {(head + data)[:300]!r}")
                return
            self._head = None
        now = time.monotonic_ns()
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            if DATA in event:
                made = event.index(MADE) + len(MADE)
                self._counted.delays_ms.append((now - int(event[made : event.index(b"}", made)])) / 1e6)
                self._tokens += 1
                self._counted.tokens += 1
            elif b"data: [DONE]" in event:
                complete = self._tokens == self._wanted
                self._end(None if complete else f"{self._tokens} of {self._wanted} tokens at the end")
        if self._tokens and not self.opened.done():
            self._counted.open += 1
            self.opened.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        """Report a stream that did not end; asyncio's hook."""
        self._end(f"connection lost after {self._tokens} of {self._wanted} tokens: {error!r}")

    def send(self, request: bytes) -> None:
        """Send the request."""
        self._transport.write(request)

    def _end(self, failure: str | None) -> None:
        """Record the end once, and close the connection."""
        if self._wanted < 0:
            return
        self._wanted = -1
        if self.opened.done():
            self._counted.open -= 1
        else:
            self.opened.set_result(None)
        self._counted.ended += 1
        if failure is not None:
            self._counted.failures[failure] += 1
        self._transport.close()


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


def client(port: int, streams: int, pace_s: float, reports: Connection) -> None:
    """Open `streams` streams, all of which end at one time; answer requests for a report.

    Sends True once it runs. Receives the monotonic time of the streams' end, then sends a `Counts`
    for each message; ends with None.
    """
    reports.send(True)
    until = reports.recv()
    counts = Counts()

    async def open_some(left: Any) -> None:
        loop = asyncio.get_running_loop()
        for _ in left:
            wanted = max(math.ceil((until - time.monotonic()) / pace_s), 1)
            try:
                _, stream = await loop.create_connection(lambda: Stream(counts, wanted), "127.0.0.1", port)  # noqa: B023
            except OSError as error:
                counts.failures[repr(error)] += 1
                counts.ended += 1
                continue
            stream.send(raw(port, body(PROMPT_BYTES, wanted, 1e3 * pace_s)))
            await stream.opened

    async def answer() -> None:
        while await asyncio.to_thread(reports.recv):
            reports.send(counts)
            counts.delays_ms = []

    async def run() -> None:
        left = iter(range(streams))
        opening = [asyncio.create_task(open_some(left)) for _ in range(OPENING)]
        await answer()
        for one in opening:
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


def percentiles(delays_ms: list[float]) -> tuple[float, float, float]:
    """Return median, 99th percentile and maximum."""
    if len(delays_ms) < 2:
        return 0.0, 0.0, 0.0
    return statistics.median(delays_ms), statistics.quantiles(delays_ms, n=100)[98], max(delays_ms)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--minutes", type=int, default=10)
    parser.add_argument("--pace-s", type=float, default=20.0)
    given = parser.parse_args()
    raise_file_limit(given.streams)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    rows: list[dict[str, Any]] = []
    with running(port, None, application(port, given.streams + SPARE_SLOTS)):
        found = processes()

        def measure(when: str, counts: Counts) -> None:
            delays = percentiles(counts.delays_ms)
            rss = {name: process.memory_info().rss / 1e6 for name, process in found.items()}
            cpu_s = {name: sum(process.cpu_times()[:2]) for name, process in found.items()}
            row = {"when": when, "open": counts.open, "ended": counts.ended, "tokens": counts.tokens}
            row |= {"failures": counts.failures.total(), "rss_mb": rss, "cpu_s": cpu_s, "delay_ms": delays}
            rows.append(row)
            memory = ", ".join(f"{name} {value:.1f}" for name, value in rss.items())
            print(
                f"{when:>14}: {counts.open:6d} open, {counts.tokens:8d} tokens, {row['failures']} failed;"
                f" MB: {memory}; delay of a token {delays[0]:.1f} ms, p99 {delays[1]:.0f}, longest {delays[2]:.0f}",
                flush=True,
            )
            for failure, count in counts.failures.most_common(3):
                print(f"{'':>14}  {count} x {failure}", flush=True)

        clients = Clients(port, given.streams, given.pace_s)
        measure("before", Counts())
        began = time.monotonic()
        opening_s = given.streams / OPENED_PER_S
        until = began + opening_s + 60 * given.minutes + 2 * given.pace_s
        clients.begin(until)
        while (counts := clients.counts()).open < given.streams and not counts.ended:
            if time.monotonic() - began > opening_s:
                break
            time.sleep(1)
        opened_s = time.monotonic() - began
        # The router's memory may still grow for a minute: garbage of the openings.
        measure("all open", counts)
        full = time.monotonic()
        for minute in range(1, given.minutes + 1):
            time.sleep(max(full + 60 * minute - time.monotonic(), 0))
            measure(f"{minute} min", clients.counts())
        while (counts := clients.counts()).ended < given.streams and time.monotonic() < until + 60:
            time.sleep(1)
        left, routes = settled(url), counted(url)
        measure("after", counts)
        clients.close()
    before, first, last = rows[0], rows[1], rows[-2]
    per_stream_kb = {
        name: 1e3 * (first["rss_mb"][name] - before["rss_mb"][name]) / given.streams for name in before["rss_mb"]
    }
    growth = {name: last["rss_mb"][name] / first["rss_mb"][name] for name in before["rss_mb"]}
    cpu_us = {
        name: 1e6 * (last["cpu_s"][name] - first["cpu_s"][name]) / max(last["tokens"] - first["tokens"], 1)
        for name in before["rss_mb"]
    }
    print(f"{given.streams} streams opened in {opened_s:.0f} s; a token every {given.pace_s:g} s")
    for name in growth:
        print(
            f"{name:8} {per_stream_kb[name]:6.1f} KB per stream, memory x {growth[name]:.3f} in {given.minutes} min,"
            f" {cpu_us[name]:.0f} us of processor time per token"
        )
    print(f"left afterwards: {left}")
    document = {
        "streams": given.streams,
        "pace_s": given.pace_s,
        "opened_s": opened_s,
        "kb_per_stream": per_stream_kb,
        "growth": growth,
        "cpu_us_per_token": cpu_us,
        "left": left,
        "rows": rows,
    }
    print("written to", write("open_streams", document))
    wrong = [
        (any(row["open"] != given.streams for row in rows[1:-1]), "not all streams are open at each measurement"),
        (bool(counts.failures) or counts.ended != given.streams, "streams failed or did not end"),
        (routes.get("remote") != given.streams, f"not all requests took the remote route: {routes}"),
        (any(value > FLAT for value in growth.values()), f"memory grows by more than x {FLAT}"),
        (per_stream_kb["Router"] > MOST_ROUTER_KB, f"a stream costs the router more than {MOST_ROUTER_KB} KB"),
        (per_stream_kb["Decode"] > MOST_ENGINE_KB, f"a stream costs decode more than {MOST_ENGINE_KB} KB"),
        (any(left.values()), "something is left"),
    ]
    for failed, why in wrong:
        if failed:
            print(f"FAILED: {why}")
    return 1 if any(failed for failed, _ in wrong) else 0


if __name__ == "__main__":
    sys.exit(main())
