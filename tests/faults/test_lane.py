"""Leaks are read from vLLM's own gauge, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from testing.servers import POOL_BLOCKS
from tests.campaigns.faults.lane import Lane
from tests.campaigns.faults.presets import PRESETS
from tests.campaigns.faults.questions import Questions


@dataclass
class Engine:
    """A server with an address that is alive."""

    url: str
    runs: bool = True
    data_parallel_size: int = 1

    def alive(self) -> bool:
        return self.runs


@contextlib.asynccontextmanager
async def engine(used: Callable[[], int]) -> AsyncIterator[Engine]:
    """Start a server that answers every request; its metrics have a gauge of ``used`` blocks."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            gauge = used() / POOL_BLOCKS if b"/metrics" in head else "not asked"
            body = f'vllm:kv_cache_usage_perc{{engine="0",model_name="demo"}} {gauge}\n'.encode()
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield Engine(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    finally:
        listener.close()


@contextlib.asynccontextmanager
async def lane_of(folder: Path, used: Callable[[], int], held_s: float) -> AsyncIterator[Lane]:
    async with engine(used) as prefill, httpx.AsyncClient(timeout=None) as client:
        lane = Lane(replace(PRESETS["tandem"], held_s=held_s), folder, Questions({}), client)
        lane.servers = {"prefill": prefill}  # type: ignore[dict-item]
        lane.baseline = {"prefill": 1}
        lane.repair = asyncio.ensure_future(asyncio.sleep(0, {}))
        await lane.repair
        yield lane


async def test_a_block_that_stays_is_a_leak(tmp_path: Path) -> None:
    """One block above the baseline is a leak; blocks that come back are timed."""
    async with lane_of(tmp_path, lambda: 2, held_s=0.5) as lane:
        pool = await lane.pool("prefill", time.monotonic())
    assert (pool.back_after_s, pool.most) == (None, 1)
    left = [40, 40, 7, 1]
    async with lane_of(tmp_path, lambda: left.pop(0) if len(left) > 1 else left[0], held_s=60.0) as lane:
        pool = await lane.pool("prefill", time.monotonic() - 3.0)
    assert (pool.back_after_s or 0.0) > 3.0
    assert pool.most == 6


async def test_an_engine_that_dies_is_not_waited_for(tmp_path: Path) -> None:
    """A server's death is a separate finding."""
    async with lane_of(tmp_path, lambda: 2, held_s=3600.0) as lane:
        lane.servers["prefill"].runs = False  # type: ignore[attr-defined]
        assert (await lane.pool("prefill", time.monotonic())).back_after_s is None
