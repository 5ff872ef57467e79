"""Concurrent requests for one result cause one call."""

from __future__ import annotations

import asyncio

import pytest

from actors.router.single_flight import SingleFlight

pytestmark = pytest.mark.usefixtures("virtual_time")

AGE_S = 0.2


async def test_one_answer_for_all_who_ask_together() -> None:
    """Waiting callers use the result even if the call takes longer than its result may be old.

    If the calling request is cancelled, a waiting one calls in its place.
    """
    calls: list[None] = []

    async def work() -> int:
        calls.append(None)
        await asyncio.sleep(2 * AGE_S)
        return len(calls)

    flight = SingleFlight(work, AGE_S)
    first, *others = [asyncio.create_task(flight()) for _ in range(5)]
    await asyncio.sleep(AGE_S)
    first.cancel()
    assert await asyncio.gather(*others) == [2] * 4
    assert await flight() == 2
    await asyncio.sleep(1.5 * AGE_S)
    assert await flight() == 3
