"""The timer of a stream's deadlines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import uvloop

from actors.moving_timer import MovingTimer


class Recorded:
    """A timer, and the times at which it has expired."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.began_at = self.loop.time()
        self.expired_at: list[float] = []
        self.timer = MovingTimer(lambda: self.expired_at.append(round(self.loop.time() - self.began_at, 3)))

    def set(self, after_s: float | None) -> None:
        self.timer.set(None if after_s is None else self.began_at + after_s)


@pytest.mark.usefixtures("virtual_time")
async def test_the_deadline_moves() -> None:
    """The last one counts, whether it is later or earlier than the one before."""
    one = Recorded()
    for after_s in (1.0, 3.0, 2.0):
        one.set(after_s)
    await asyncio.sleep(5)
    assert one.expired_at == [2.0]


@pytest.mark.usefixtures("virtual_time")
async def test_a_removed_deadline() -> None:
    one = Recorded()
    one.set(1.0)
    one.set(None)
    await asyncio.sleep(2)
    assert one.expired_at == []
    one.set(3.0)
    await asyncio.sleep(2)
    assert one.expired_at == [3.0]


class CountingLoop:
    """The running event loop, with a record of the timers started through this object."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.time = loop.time
        self.started: list[asyncio.TimerHandle] = []
        self._call_at: Callable[..., asyncio.TimerHandle] = loop.call_at

    def call_at(self, *arguments: Any) -> asyncio.TimerHandle:
        self.started.append(self._call_at(*arguments))
        return self.started[-1]


@pytest.mark.usefixtures("virtual_time")
async def test_a_closed_timer_leaves_nothing_in_the_loop() -> None:
    one, loop = Recorded(), CountingLoop()
    one.timer._loop = loop  # type: ignore[assignment]  # noqa: SLF001
    one.set(1.0)
    one.set(0.5)
    one.timer.close()
    assert [timer.cancelled() for timer in loop.started] == [True, True]


@pytest.mark.usefixtures("virtual_time")
async def test_a_stream_of_tokens_starts_few_timers() -> None:
    """Ten seconds of tokens with a deadline of a second each."""
    one, loop = Recorded(), CountingLoop()
    one.timer._loop = loop  # type: ignore[assignment]  # noqa: SLF001
    for number in range(1000):
        one.set(number * 0.01 + 1.0)
        one.set(None)
        one.set(number * 0.01 + 1.0)
        await asyncio.sleep(0.01)
    assert len(loop.started) < 15
    assert one.expired_at == []
    await asyncio.sleep(2)
    assert one.expired_at == [10.99]


def test_deadlines_below_the_resolution_of_uvloop() -> None:
    """The handle of a timer that is due at once has no time of its own."""

    async def move() -> list[float]:
        one = Recorded()
        for _ in range(200):
            one.timer.set(one.loop.time() + 0.0002)
            one.timer.set(one.loop.time() + 0.0001)
            await asyncio.sleep(0)
        one.timer.set(one.loop.time() + 0.05)
        await asyncio.sleep(0.2)
        return one.expired_at

    assert uvloop.run(move())[-1] >= 0.049
