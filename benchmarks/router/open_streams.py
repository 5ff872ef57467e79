"""Thousands of streams that are open at the same time on one router: memory per stream, and its
growth.

Tandem's service with instant engines, over HTTP. One client process opens the streams; each stream
receives a token every PACE_S seconds and ends after the last minute. The engines have more slots
than streams (`max_ongoing_sequences`), and all processes may open as many files as the hard limit
permits. Measured before the first stream, with all streams open, after each minute, and after the
last stream: resident memory of the router and both engines.

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
import resource
import statistics
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import psutil
import uvloop

from benchmarks.report import failed, p99, write
from benchmarks.router.disconnects import counted, processes, settled
from benchmarks.router.load import DATA, age_s, body, raw
from benchmarks.router.service import application, running
from testing.ports import free_port

PROMPT_BYTES = 200
OPENING = 64
"""Streams that open at a time."""

OPENED_PER_S = 25.0
"""Lowest expected rate at which streams open, to compute their lengths."""

SPARE_FILES = 1000
SPARE_SLOTS = 64
"""Slots of calls whose end an engine has not seen yet."""

FLAT = 1.05
MOST_ROUTER_KB = 100.0
MOST_ENGINE_KB = 100.0


class Streams:
    """All streams: how many are open, have ended or failed, and the delays of their tokens since
    the last measurement, from the creation to the arrival.
    """

    def __init__(self, port: int, pace_s: float) -> None:
        self._port, self._pace_s = port, pace_s
        self._tasks: set[asyncio.Task[None]] = set()
        self.open = self.ended = self.tokens = 0
        self.failures: Counter[str] = Counter()
        self.delays_ms: list[float] = []

    async def begin(self, count: int, until: float) -> None:
        """Open the streams, all of which end at the monotonic time ``until``."""
        left = iter(range(count))

        async def open_some() -> None:
            for _ in left:
                wanted, opened = max(math.ceil((until - time.monotonic()) / self._pace_s), 1), asyncio.Event()
                self._tasks.add(asyncio.create_task(self._read(wanted, opened)))
                await opened.wait()

        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(open_some() for _ in range(OPENING))), count / OPENED_PER_S)

    async def end(self, until: float) -> None:
        """Wait for the ends of all streams, at most until the monotonic time ``until``."""
        await asyncio.wait(self._tasks, timeout=until - time.monotonic())

    async def _read(self, wanted: int, opened: asyncio.Event) -> None:
        """Read one stream of `wanted` tokens on its own connection to its end."""
        tokens = 0
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            writer.write(raw(self._port, body(PROMPT_BYTES, wanted, 1e3 * self._pace_s)))
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200 "):
                raise ValueError(f"unexpected response: {head[:300]!r}")
            while b"data: [DONE]" not in (event := await reader.readuntil(b"\n\n")):
                if DATA in event:
                    self.delays_ms.append(1e3 * age_s(event, time.monotonic_ns()))
                    self.tokens += 1
                    self.open += not tokens
                    tokens += 1
                    opened.set()
            if tokens != wanted:
                raise ValueError("too few tokens at the end")
            writer.close()
        except (OSError, EOFError, ValueError) as error:
            self.failures[f"{error!r} after {tokens} of {wanted} tokens"] += 1
        self.open -= bool(tokens)
        self.ended += 1
        opened.set()


def raise_file_limit(streams: int) -> None:
    """Raise the limit of open files for this process and its children.

    Raises SystemExit if the hard limit is too low.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < streams + SPARE_FILES:
        raise SystemExit(f"the hard limit of open files is {hard}; set it to {streams + SPARE_FILES} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measured(when: str, streams: Streams, found: dict[str, psutil.Process]) -> dict[str, Any]:
    delays, streams.delays_ms = streams.delays_ms if len(streams.delays_ms) > 1 else [0.0, 0.0], []
    row: dict[str, Any] = {"when": when, "open": streams.open, "ended": streams.ended, "tokens": streams.tokens}
    row["failures"] = streams.failures.total()
    row["rss_mb"] = {name: process.memory_info().rss / 1e6 for name, process in found.items()}
    row["cpu_s"] = {name: sum(process.cpu_times()[:2]) for name, process in found.items()}
    row["delay_ms"] = statistics.median(delays), p99(delays), max(delays)
    memory = ", ".join(f"{name} {value:.1f}" for name, value in row["rss_mb"].items())
    print(
        f"{when:>14}: {streams.open:6d} open, {streams.tokens:8d} tokens, {row['failures']} failed; MB: {memory};"
        " delay of a token {:.1f} ms, p99 {:.0f}, longest {:.0f}".format(*row["delay_ms"]),
        flush=True,
    )
    for failure, count in streams.failures.most_common(3):
        print(f"{'':>14}  {count} x {failure}", flush=True)
    return row


async def measure(
    port: int, count: int, minutes: int, pace_s: float, found: dict[str, psutil.Process]
) -> tuple[list[dict[str, Any]], float]:
    """Return the measurements, and the seconds in which all streams have opened."""
    streams = Streams(port, pace_s)
    rows = [measured("before", streams, found)]
    began = time.monotonic()
    until = began + count / OPENED_PER_S + 60 * minutes + 2 * pace_s
    await streams.begin(count, until)
    opened_s = time.monotonic() - began
    # The router's memory may still grow for a minute: garbage of the openings.
    rows.append(measured("all open", streams, found))
    full = time.monotonic()
    for minute in range(1, minutes + 1):
        await asyncio.sleep(full + 60 * minute - time.monotonic())
        rows.append(measured(f"{minute} min", streams, found))
    await streams.end(until + 60)
    return [*rows, measured("after", streams, found)], opened_s


def main(*, streams: int = 10_000, minutes: int = 10, pace_s: float = 20.0) -> int:
    raise_file_limit(streams)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running(port, None, application(port, streams + SPARE_SLOTS)):
        found = processes()
        rows, opened_s = uvloop.run(measure(port, streams, minutes, pace_s, found))
        left, routes = settled(url), counted(url)
    before, first, last = rows[0], rows[1], rows[-2]
    print(f"{streams} streams opened in {opened_s:.0f} s; a token every {pace_s:g} s; left afterwards: {left}")
    kb_per_stream, growth, cpu_us = {}, {}, {}
    tokens = max(last["tokens"] - first["tokens"], 1)
    for name in found:
        kb_per_stream[name] = 1e3 * (first["rss_mb"][name] - before["rss_mb"][name]) / streams
        growth[name] = last["rss_mb"][name] / first["rss_mb"][name]
        cpu_us[name] = 1e6 * (last["cpu_s"][name] - first["cpu_s"][name]) / tokens
        print(
            f"{name:8} {kb_per_stream[name]:6.1f} KB per stream, memory x {growth[name]:.3f} in {minutes} min,"
            f" {cpu_us[name]:.0f} us of processor time per token"
        )
    document = {"streams": streams, "pace_s": pace_s, "opened_s": opened_s, "kb_per_stream": kb_per_stream}
    write("open_streams", document | {"growth": growth, "cpu_us_per_token": cpu_us, "left": left, "rows": rows})
    return failed(
        {
            "not all streams are open at each measurement": any(row["open"] != streams for row in rows[1:-1]),
            "streams failed or did not end": bool(rows[-1]["failures"]) or rows[-1]["ended"] != streams,
            f"not all requests took the remote route: {routes}": routes.get("remote") != streams,
            f"memory grows by more than x {FLAT}": any(value > FLAT for value in growth.values()),
            f"a stream costs the router more than {MOST_ROUTER_KB} KB": kb_per_stream["Router"] > MOST_ROUTER_KB,
            f"a stream costs decode more than {MOST_ENGINE_KB} KB": kb_per_stream["Decode"] > MOST_ENGINE_KB,
            "something is left": any(left.values()),
        }
    )
