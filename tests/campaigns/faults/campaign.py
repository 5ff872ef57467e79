"""A seeded campaign of faults against any vLLM KV connector with the public request protocol.

CPU only. Several lanes share a machine: most of a fault's time is spent on deadlines.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx

from testing.ports import free_port
from testing.servers import Server
from tests.campaigns.faults import schedule
from tests.campaigns.faults.lane import START_S, Lane
from tests.campaigns.faults.presets import PRESETS
from tests.campaigns.faults.questions import Questions, known
from tests.campaigns.faults.schedule import Injection
from tests.campaigns.runner import Report

Faults = Iterator[Injection]


def client() -> httpx.AsyncClient:
    """Return a client without idle connections: a server may have been replaced meanwhile."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(timeout=None, limits=limits)


async def ask_plain_engine(folder: Path, damage: float = 0.0) -> Questions:
    plain = Server("plain", free_port(), 1, folder, None)
    plain.start()
    try:
        await asyncio.to_thread(plain.wait_until_up, START_S)
        async with client() as http:
            return await known(http, plain.url, damage)
    finally:
        plain.destroy()


async def play(
    report: Report, which: str, todo: Faults, lanes: int, damage: float, tp: tuple[int, int] = (1, 1)
) -> None:
    """Run lanes that take the next fault each, until the last one or SIGTERM."""
    task = asyncio.current_task()
    assert task is not None
    # The servers are in sessions of their own and would stay.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    connector, questions = PRESETS[which], await ask_plain_engine(report.folder, damage)

    async def drive(lane: Lane) -> None:
        try:
            await lane.start("prefill", "decode")
            for fault in todo:
                name = f"{fault.index}: {fault.what}, {fault.first.phase}"
                with report.case(name):
                    told = await lane.play(fault)
                    report.row(
                        family=fault.family,
                        what=fault.what,
                        phase=fault.first.phase,
                        index=fault.index,
                        connector=which,
                        **told,
                    )
                    for finding in told.get("findings", ()):
                        report.problem(f"{name}: {finding}")
                    continue
                await lane.start("prefill", "decode")  # the campaign itself has failed
        except RuntimeError as error:
            report.problem(f"{lane.folder.name} stops: {error}")  # the other lanes continue
        finally:
            lane.destroy()

    async with client() as http, asyncio.TaskGroup() as group:
        for number in range(lanes):
            group.create_task(drive(Lane(connector, report.folder / f"lane-{number}", questions, http, tp)))


def _chosen(faults: Faults, count: int, only: str) -> Faults:
    """Yield the first faults, or those with the numbers ``only``."""
    numbers = [int(number) for number in only.split()]
    for fault in itertools.islice(faults, max(numbers, default=count - 1) + 1):
        if not numbers or fault.index in numbers:
            yield fault


def _sizes(text: str) -> tuple[int, int]:
    prefill, decode = map(int, text.split(":"))
    return prefill, decode


def faults(
    report: Report,
    *,
    count: int = 200,
    seed: int = 1,
    connector: str = "tandem",
    tp: str = "1:1",
    lanes: int = 1,
    only: str = "",
    match: str = "",
    damage: float = 0.0,
) -> None:
    """The first ``count`` faults of a seed that match ``match``, or those numbered ``only``."""
    todo = _chosen(schedule.schedule(seed, _sizes(tp), match), count, only)
    asyncio.run(play(report, connector, todo, lanes, damage, _sizes(tp)))


def pairs(
    report: Report,
    *,
    count: int = 200,
    seed: int = 1,
    tp: str = "2:1",
    lanes: int = 1,
    only: str = "",
    damage: float = 0.0,
) -> None:
    """Two faults at a time."""
    todo = _chosen(schedule.pairs(seed, _sizes(tp)), count, only)
    asyncio.run(play(report, "tandem", todo, lanes, damage, _sizes(tp)))
