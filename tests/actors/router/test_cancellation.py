"""A request cancelled at each wait of the router and at each item: no slot, call or KV stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from actors.request import TRANSFER_FIELD, Call, Heartbeat, ResponseStart
from actors.router.client_request import ClientRequest
from actors.router.router import Router
from tests.actors.behaviours import (
    JSON,
    LIMITS,
    OK,
    answers,
    ask,
    cut_off,
    dies,
    engine,
    fleet,
    hangs,
    prefills,
    request,
    transfers,
    well,
)
from tests.actors.fleet import Handle, Replica, at_rest, router_of

pytestmark = pytest.mark.usefixtures("virtual_time")

FAR = 1000
"""Number above the waits of any of these requests."""


class CancelledAt:
    """Await `work`, and cancel the running task at its n-th wait."""

    def __init__(self, work: Any, n: int) -> None:
        self._work = work
        self._n = n
        self.waits = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        steps = self._work.__await__()
        waited_for = steps.send(None)
        while True:
            self.waits += 1
            if self.waits == self._n:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            try:
                value = yield waited_for
            except BaseException as error:
                step = (steps.throw, error)
            else:
                step = (steps.send, value)
            try:
                waited_for = step[0](step[1])
            except StopIteration as end:
                return end.value


async def run(fleet: tuple[Router, Handle, Handle], wanted: ClientRequest, wait: int, item: int) -> tuple[int, int]:
    """Return the numbers of the router's waits, and of items between engines and router.

    Cancels the request at the n-th `wait`, or before the n-th `item`.
    """
    router, *handles = fleet
    work = CancelledAt(ask(router, wanted), wait)
    items = 0

    async def until_its_end() -> None:
        await work

    task = asyncio.create_task(until_its_end())

    def on_item() -> None:
        nonlocal items
        items += 1
        if items == item:
            task.cancel()

    for handle in handles:
        handle.on_item = on_item
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    return work.waits, items


def short(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """A stream of a few large groups: enough waits, not hundreds."""
    return engine(2, [14])(call, turn)


async def slow_to_answer(call: Call, _: int) -> AsyncGenerator[Any, None]:
    """A decode engine that has its KV, and computes."""
    await asyncio.sleep(0.01)
    yield ResponseStart(200, JSON)
    await asyncio.sleep(0.01)
    yield b"{}"


async def slow_after_its_first_token(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """A decode engine that reports the first token of an answer."""
    yield Heartbeat(tokens=True)
    async for item in slow_to_answer(call, turn):
        yield item


STORIES: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "an answer": ([well], [slow_to_answer], {"stream": False}),
    "an answer whose first token is reported": ([well], [slow_after_its_first_token], {"stream": False}),
    "a stream": ([well], [short], {}),
    "decode alone": ([], [short], {}),
    "n of 2": ([well], [short], {"n": 2}),
    "echo": ([well], [short], {"echo": True}),
    "echo, not streamed": ([well], [OK], {"stream": False, "echo": True}),
    "decode refuses": ([well], [answers(400, {}, 0.01)], {}),
    "a prefill leg dies": ([dies, well], [short, short], {}),
    "a prefill leg is late": ([hangs, well], [OK], {"stream": False}),
    "no prefill leg lives": ([dies, dies], [OK], {"stream": False}),
    "decode dies before": ([well], [dies, OK], {"stream": False}),
    "decode dies within": ([well], [cut_off, OK], {"stream": False}),
    "decode dies in mid-stream": ([well], [engine(1, [14], 20), short], {}),
}
"""Prefill's and decode's behaviours, and the request.

The test creates it, because its deadline starts then.
"""


@pytest.mark.parametrize("story", STORIES)
async def test_cancelled_at_each_wait(story):
    """Slots are returned, sent calls end, unfetched KV is discarded, and no task is left."""
    prefill, decode, more = STORIES[story]
    wanted = request(**more)

    def fresh() -> tuple[Router, Handle, Handle]:
        router, p, d = fleet(prefill, decode)
        # The same choice each time: the last replica, which is the first behaviour.
        for handle in (p, d):
            handle.replicas.reverse()
            handle.in_order = True
        if "late" in story:
            router.limits = LIMITS.model_copy(update={"prefill_timeout_s": 0.05})
        return router, p, d

    router, p, d = fresh()
    waits, items = await run((router, p, d), wanted, FAR, FAR)
    await at_rest(p, d)
    assert waits > 2
    discards = 0
    for wait, item in [*((n, FAR) for n in range(1, waits + 1)), *((FAR, n) for n in range(1, items + 1))]:
        router, p, d = fresh()
        await run((router, p, d), wanted, wait, item)
        await at_rest(p, d)
        assert wait > 1 or not p.calls + d.calls, "a cancelled call has reached an engine"
        assert set(p.discarded) <= set(transfers(p)), "a transfer unknown to prefill was discarded"
        fetched = {one for one in transfers(p) if one in p.delivered} - set(p.discarded)
        assert fetched <= set(transfers(d)), "KV waits for a decode engine without the request"
        discards += len(p.discarded)
    splits = bool(prefill) and TRANSFER_FIELD not in wanted.body and "echo" not in wanted.body
    assert (discards > 0) == (splits and "no prefill" not in story)


async def test_decode_is_cancelled_before_its_transfer_is_discarded():
    """Else decode would compute the prompt, whose KV has just been freed."""
    order: list[str] = []

    class Discards(list[str]):
        def append(self, transfer_id: str) -> None:
            order.append("discard")

    async def waits(call: Call, _: int) -> AsyncGenerator[Any, None]:
        try:
            await asyncio.sleep(60)
            yield
        finally:
            order.append("decode")

    p, d = Handle([]), Handle([Replica("d0", waits)])
    p.discarded = Discards()
    p.replicas = [Replica("p0", prefills(lambda: p))]
    asking = asyncio.create_task(ask(router_of(LIMITS, p, d), request()))
    async with asyncio.timeout(30):
        while not (p.calls and d.calls):  # noqa: ASYNC110 - the fleet has no event for it
            await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait({asking})
    await at_rest(p, d)
    assert order == ["decode", "discard"]
