"""Concurrent requests for one result cause one call."""

from __future__ import annotations

import asyncio

import pytest

from actors.router.single_flight import SingleFlight

pytestmark = pytest.mark.usefixtures("virtual_time")

AGE_S = 0.2


class Work:
    """Callable that counts its calls; each takes `takes_s`."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s = takes_s
        self.done = 0
        self.problem: Exception | None = None

    async def __call__(self) -> int:
        await asyncio.sleep(self.takes_s)
        self.done += 1
        if self.problem is not None:
            raise self.problem
        return self.done


async def test_one_answer_for_all_who_ask_together() -> None:
    """Waiting callers use the result even if the call takes longer than its result may be old."""
    flight = SingleFlight(Work(2 * AGE_S), AGE_S)
    assert await asyncio.gather(*(flight() for _ in range(5))) == [1] * 5
    assert await flight() == 1


async def test_an_answer_that_is_old_is_made_anew() -> None:
    flight = SingleFlight(Work(), AGE_S)
    assert [await flight(), await flight()] == [1, 1]
    await asyncio.sleep(1.5 * AGE_S)
    assert await flight() == 2


async def test_no_answer_is_kept_where_there_was_none() -> None:
    """An exception goes to the callers, and the next caller calls again."""
    work = Work()
    flight = SingleFlight(work, AGE_S)
    work.problem = RuntimeError("not now")
    with pytest.raises(RuntimeError, match="not now"):
        await flight()
    work.problem = None
    assert await flight() == 2


async def test_one_who_leaves_takes_nothing_from_the_others() -> None:
    """If the calling request is cancelled, a waiting one calls in its place."""
    flight = SingleFlight(Work(AGE_S / 4), AGE_S)
    first, second = asyncio.create_task(flight()), asyncio.create_task(flight())
    await asyncio.sleep(AGE_S / 8)
    first.cancel()
    assert await second == 1
