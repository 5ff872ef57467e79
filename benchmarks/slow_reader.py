"""A router that does not read one stream: bytes in flight, blocked event loops, and other streams.

    python -m benchmarks.slow_reader [--pause-s 3] [--rounds 5]

Without vLLM or Ray. An engine process serves an ASGI application through `call_asgi` and the RPC
server, as an engine's actor does. One stream of 16.8 MB in events of 700 bytes is sent as fast as
`send` returns; eight others get a token every 5 ms. The router process reads a little of the first
stream, pauses for `--pause-s`, and then reads the rest, while it reads the others all the time.

In flight is what the application has sent and the router has not read at the end of the pause. A
task in each process wakes once a millisecond: the longest time between two wake-ups shows how long
the event loop was blocked. It includes the time in which another process had the core, so the
processor time between two wake-ups is measured, too. Exits with 1 if more than MOST_BYTES are in
flight, if that processor time exceeds MOST_S in a round, or if the longest time between two
wake-ups exceeds MOST_S in all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import aclosing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import uvloop

from actors.engine.asgi_call import call_asgi
from actors.engine_pool import engines as engines_module
from actors.engine_pool.discovery import EngineReplica
from actors.engine_pool.engine_call import EngineCall
from actors.engine_pool.engines import EnginePool
from actors.request import Accepted, Call
from actors.rpc.messages import RpcRequest
from actors.rpc.server import RpcServer, replica_metadata
from benchmarks.report import write

EVENTS, EVENT_BYTES = 24_000, 700
OTHERS, STEP_S = 8, 0.005
SLOTS = 64
MOST_BYTES = 4 * 10**6
MOST_S = 0.05


@dataclass
class Blocked:
    """Longest times between two wake-ups of a task, in seconds of clock and of processor time."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    async def watch(self) -> None:
        """Measure until cancelled."""
        while True:
            wall_s, cpu_s = time.monotonic(), time.thread_time()
            await asyncio.sleep(0.001)
            self.wall_s = max(self.wall_s, time.monotonic() - wall_s - 0.001)
            self.cpu_s = max(self.cpu_s, time.thread_time() - cpu_s)


class Application:
    """ASGI application that streams events as fast as `send` returns, or one every STEP_S."""

    def __init__(self) -> None:
        self.sent_bytes = 0
        self.ended = asyncio.Event()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/large":
            for number in range(EVENTS):
                await send({"type": "http.response.body", "body": b"x" * EVENT_BYTES, "more_body": True})
                self.sent_bytes += EVENT_BYTES
                if number % 50 == 0:
                    await asyncio.sleep(0)  # let other tasks run, as between an engine's steps
            self.ended.set()
        else:
            while not self.ended.is_set():
                event = b"%d\n" % time.monotonic_ns()
                await send({"type": "http.response.body", "body": event, "more_body": True})
                await asyncio.sleep(STEP_S)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def engine(host: Connection) -> None:
    """Run the engine's process. Send its address, the bytes sent so far for each message, and the
    blocked times at None.
    """

    async def run() -> None:
        application, blocked = Application(), Blocked()

        async def answer(request: RpcRequest, _: Any) -> AsyncGenerator[Any, None]:
            yield Accepted("e", 1)
            async with aclosing(call_asgi(application, request.call)) as items:
                async for item in items:
                    yield item

        server = RpcServer(answer, SLOTS)
        host.send(await server.open("127.0.0.1", 0))
        await asyncio.to_thread(host.recv)
        watching = asyncio.create_task(blocked.watch())
        while await asyncio.to_thread(host.recv):
            host.send(application.sent_bytes)
        watching.cancel()
        host.send(blocked)
        await server.close()

    uvloop.run(run())


async def read(address: Any, host: Connection, pause_s: float) -> tuple[int, Blocked, list[float]]:
    """Return bytes in flight, this process's blocked times, and the delays of other streams."""
    known = {"e": EngineReplica(address, SLOTS, SLOTS, replica_metadata(address, SLOTS), "e")}
    engines_module.replicas_of = lambda _: known  # type: ignore[assignment]
    handle: Any = SimpleNamespace(deployment_id="e")
    handle.options = lambda: handle
    pool = EnginePool("decode", handle)
    delays_ms: list[float] = []

    async def other() -> None:
        call = pool.dispatch(await pool.take(), Call("GET", "/other"))
        async for item in _bodies(call):
            now = time.monotonic_ns()
            delays_ms.extend((now - int(made)) / 1e6 for made in item.split())

    others = [asyncio.create_task(other()) for _ in range(OTHERS)]
    while len(delays_ms) < 100 * OTHERS:  # noqa: ASYNC110 - warm-up
        await asyncio.sleep(0.01)
    delays_ms.clear()
    host.send(True)
    blocked = Blocked()
    watching = asyncio.create_task(blocked.watch())
    bodies = _bodies(pool.dispatch(await pool.take(), Call("GET", "/large")))
    seen = len(await anext(bodies))
    await asyncio.sleep(pause_s)
    host.send(True)
    in_flight = await asyncio.to_thread(host.recv) - seen
    async for item in bodies:
        seen += len(item)
    assert seen == EVENTS * EVENT_BYTES, f"{seen} bytes"
    await asyncio.gather(*others)
    watching.cancel()
    await pool.close()
    return in_flight, blocked, delays_ms


async def _bodies(call: EngineCall) -> AsyncGenerator[bytes, None]:
    while (item := await call.next()) is not None:
        if isinstance(item, bytes):
            yield item


def measure(pause_s: float) -> dict[str, float]:
    """Run both processes once; return what they measured."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(there,))
    process.start()
    in_flight, router, delays_ms = uvloop.run(read(here.recv(), here, pause_s))
    here.send(None)
    other_side: Blocked = here.recv()
    process.join()
    return {
        "in_flight_bytes": in_flight,
        "engine_blocked_ms": 1e3 * other_side.wall_s,
        "engine_blocked_cpu_ms": 1e3 * other_side.cpu_s,
        "router_blocked_ms": 1e3 * router.wall_s,
        "router_blocked_cpu_ms": 1e3 * router.cpu_s,
        "others_p50_ms": statistics.median(delays_ms),
        "others_p99_ms": statistics.quantiles(delays_ms, n=100)[98],
        "others_most_ms": max(delays_ms),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pause-s", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rounds = [measure(given.pause_s) for _ in range(given.rounds)]
    for name in rounds[0]:
        values = [one[name] for one in rounds]
        print(f"{name:22} median {statistics.median(values):>12,.1f}   most {max(values):>12,.1f}")
    print("written to", write("slow_reader", {"pause_s": given.pause_s, "rounds": rounds}))
    wrong = [one for one in rounds if one["in_flight_bytes"] > MOST_BYTES]
    # The machine may pause a process, so one round below the limit is enough for the clock.
    for side in ("engine", "router"):
        wrong += [one for one in rounds if one[f"{side}_blocked_cpu_ms"] > 1e3 * MOST_S]
        if min(one[f"{side}_blocked_ms"] for one in rounds) > 1e3 * MOST_S:
            wrong += rounds
    if wrong:
        print(f"FAILED: more than {MOST_BYTES} bytes in flight, or an event loop was blocked for more than {MOST_S} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
