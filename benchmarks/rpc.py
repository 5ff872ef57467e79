"""Processor time per streamed token of the connection between a router and an engine.

    python -m benchmarks.rpc [--streams 8 64] [--steps 400] [--rounds 5] [--grpc]

Without vLLM or Ray. An engine process emits one token per stream and step, `--step-ms` apart, to a
router process that counts them. The processor time of both processes from the first to the last
token is divided by the number of tokens. `--grpc` measures grpc.aio instead of the product's
connection: one server-streaming call per stream, on one HTTP/2 connection.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import AsyncGenerator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import uvloop

from actors.engine_pool import engines as engines_module
from actors.engine_pool.discovery import EngineReplica
from actors.engine_pool.engines import EnginePool
from actors.request import Accepted, Call, ResponseStart, StreamChunk
from actors.rpc.messages import RpcRequest
from actors.rpc.server import RpcServer, replica_metadata

EVENT = b'data: {"id":"cmpl-instant","object":"text_completion","created":0,"model":"m","choices":[{"index":0,' + (
    b'"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
)
EVENTS = ((b"content-type", b"text/event-stream"),)
SLOTS = 1024


class Steps:
    """Simulated steps of an engine, each of which wakes all streams, as the engine's output handler
    does.
    """

    def __init__(self, streams: int, steps: int, step_s: float) -> None:
        self.streams, self.steps, self.step_s = streams, steps, step_s
        self.began = asyncio.Event()
        self.cpu_s = 0.0
        self._waiting: list[asyncio.Future[None]] = []
        self._joined = 0
        self._running: asyncio.Task[None] | None = None

    async def join(self) -> None:
        """Wait until all streams have arrived."""
        self._joined += 1
        if self._joined == self.streams:
            self._running = asyncio.create_task(self._run())
            self.began.set()
        await self.began.wait()

    async def next(self) -> None:
        """Wait for the next step."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        await turn

    async def _run(self) -> None:
        await asyncio.sleep(0.2)
        began_s = time.process_time()
        for _ in range(self.steps):
            await asyncio.sleep(self.step_s)
            while len(self._waiting) < self.streams:  # noqa: ASYNC110
                await asyncio.sleep(0)
            waiting, self._waiting = self._waiting, []
            for turn in waiting:
                turn.set_result(None)
        await asyncio.sleep(0.1)
        self.cpu_s = time.process_time() - began_s


async def serve(steps: Steps, host: Connection) -> None:
    """Run the engine's side until the router has all tokens; report its processor time."""

    async def answer(_: RpcRequest, __: Any) -> AsyncGenerator[Any, None]:
        yield Accepted("e", 1)
        yield ResponseStart(200, EVENTS)
        await steps.join()
        for number in range(steps.steps):
            await steps.next()
            yield StreamChunk(EVENT, ((number,),))

    server = RpcServer(answer, SLOTS)
    address = await server.open("127.0.0.1", 0)
    host.send(address)
    await asyncio.to_thread(host.recv)
    host.send(steps.cpu_s)
    await server.close()


async def read(address: Any, streams: int, steps: int) -> float:
    """Read all tokens; return this process's processor time."""
    known = {"e": EngineReplica(address, SLOTS, SLOTS, replica_metadata(address, SLOTS), "e")}
    engines_module.replicas_of = lambda _: known  # type: ignore[assignment]
    handle: Any = SimpleNamespace(deployment_id="e")
    handle.options = lambda: handle
    pool = EnginePool("decode", handle)
    began_s = 0.0

    async def one() -> None:
        nonlocal began_s
        slot = await pool.take()
        call = pool.dispatch(slot, Call("POST", "/v1/completions", body=b"{}"))
        seen = 0
        async for item in _items(call):
            if isinstance(item, StreamChunk):
                began_s = began_s or time.process_time()
                seen += 1
        pool.give_back(slot)
        assert seen == steps, f"{seen} of {steps} tokens"

    await asyncio.gather(*(one() for _ in range(streams)))
    cpu_s = time.process_time() - began_s
    await pool.close()
    return cpu_s


async def _items(call: Any) -> AsyncGenerator[Any, None]:
    while True:
        try:
            yield await anext(call)
        except StopAsyncIteration:
            return


async def serve_grpc(steps: Steps, host: Connection) -> None:
    """Run the engine's side over grpc.aio."""
    import grpc

    async def answer(_: bytes, __: Any) -> AsyncGenerator[bytes, None]:
        yield b"accepted"
        await steps.join()
        for _number in range(steps.steps):
            await steps.next()
            yield EVENT

    server = grpc.aio.server()
    handlers = {"Call": grpc.unary_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tandem", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    host.send(port)
    await asyncio.to_thread(host.recv)
    host.send(steps.cpu_s)
    await server.stop(0)


async def read_grpc(port: Any, streams: int, steps: int) -> float:
    """Read all tokens over grpc.aio; return this process's processor time."""
    import grpc

    began_s = 0.0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        method = channel.unary_stream("/tandem/Call")

        async def one() -> None:
            nonlocal began_s
            seen = 0
            async for item in method(b"{}"):
                if item == EVENT:
                    began_s = began_s or time.process_time()
                    seen += 1
            assert seen == steps, f"{seen} of {steps} tokens"

        await asyncio.gather(*(one() for _ in range(streams)))
    return time.process_time() - began_s


def engine(grpc: bool, streams: int, steps: int, step_s: float, host: Connection) -> None:
    """Run the engine's process."""

    async def run() -> None:
        await (serve_grpc if grpc else serve)(Steps(streams, steps, step_s), host)

    (asyncio.run if grpc else uvloop.run)(run())


def measure(grpc: bool, streams: int, steps: int, step_s: float) -> tuple[float, float]:
    """Return microseconds of processor time per token of the engine's and of the router's
    process.
    """
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=engine, args=(grpc, streams, steps, step_s, there))
    process.start()
    reading = (read_grpc if grpc else read)(here.recv(), streams, steps)
    router_s = (asyncio.run if grpc else uvloop.run)(reading)
    time.sleep(0.3)  # the engine still measures its processor time
    here.send(None)
    engine_s = here.recv()
    process.join()
    return engine_s / (streams * steps) * 1e6, router_s / (streams * steps) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grpc", action="store_true")
    given = parser.parse_args()
    for streams in given.streams:
        found = [measure(given.grpc, streams, given.steps, given.step_ms / 1e3) for _ in range(given.rounds)]
        totals = statistics.quantiles(map(sum, found)) if len(found) > 1 else [sum(found[0])] * 3
        engine_us, router_us = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"{streams:3d} streams: {totals[1]:6.1f} us per token ({totals[0]:.1f} to {totals[2]:.1f});"
            f" engine {engine_us:.1f}, router {router_us:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
