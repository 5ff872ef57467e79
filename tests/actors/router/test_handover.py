"""Prefill around decode's first token: its slot, its late report, and discarded transfers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from actors.errors import EngineDownError
from actors.request import TRANSFER_FIELD, Call, Heartbeat, ResponseStart, TokenChunk
from tests.actors.behaviours import (
    EVENTS,
    JSON,
    LIMITS,
    OK,
    WHOLE,
    ask,
    counted,
    engine,
    fed,
    prefills,
    request,
    transfers,
)
from tests.actors.fleet import Handle, Replica, at_rest, router_of

pytestmark = pytest.mark.usefixtures("virtual_time")


async def test_a_stream_that_begins_before_its_kv_is_there():
    """Events without a token do not show the handover: the prefill leg continues until the first
    token.
    """
    computing = asyncio.Event()

    async def slow_prefill(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        await computing.wait()
        async for item in prefills(lambda: p)(call, turn):
            yield item

    async def eager(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield b"event: response.created\ndata: {}\n\n"
        asyncio.get_running_loop().call_later(0.05, computing.set)
        await p.delivered[transfers(d)[0]].wait()
        yield TokenChunk(b"event: response.output_text.delta\ndata: {}\n\n", ((7,),))
        yield b"event: response.completed\ndata: {}\n\n"

    p, d = Handle([Replica("p0", slow_prefill)]), Handle([Replica("d0", eager)])
    router = router_of(LIMITS, p, d)
    wanted = request()
    wanted = replace(wanted, endpoint="/v1/responses", body={**wanted.body, "input": "x"})
    answer, body = await ask(router, wanted)
    await at_rest(p, d)
    assert (answer.route, body.count(b"event: ")) == ("remote", 3)
    assert counted(router, "tandem_prefill_legs_total", outcome="done") == 1
    assert counted(router, "tandem_resumed_streams_total", outcome="refused") == 0


@pytest.mark.parametrize("prefill_dies", [False, True])
async def test_what_prefill_does_after_decodes_first_token(prefill_dies):
    """The answer does not hold prefill's slot. The token count of a late answer is read; a death
    causes no second attempt.
    """
    finish, go_on = asyncio.Event(), asyncio.Event()

    async def decode(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        yield Heartbeat(tokens=True)
        await finish.wait()
        async for item in OK(call, turn):
            yield item

    async def prefill(call: Call, _: int) -> AsyncGenerator[Any, None]:
        p.delivered[json.loads(call.body)[TRANSFER_FIELD]["transfer_id"]].set()
        await go_on.wait()
        if prefill_dies:
            raise EngineDownError("killed")
        yield ResponseStart(200, JSON)
        yield b'{"usage": {"prompt_tokens": 17}}'
        await asyncio.sleep(60)

    p = Handle([Replica("p0", prefill)])
    d = Handle([Replica("d0", fed(decode, p))])
    asking = asyncio.create_task(ask(router_of(LIMITS, p, d), request(False)))
    await asyncio.sleep(1)  # until the router has read the first token
    go_on.set()
    await asyncio.sleep(1)
    assert (asking.done(), d.taken, p.taken, p.running) == (False, 1, 0, 0)
    finish.set()
    answer, body = await asking
    assert (answer.route, json.loads(body), len(p.calls), len(d.calls)) == ("remote", WHOLE, 1, 1)
    assert answer.prompt_tokens == (None if prefill_dies else 17)
    await at_rest(p, d)
    assert p.discarded == []


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_does_not_wait_for_prefills_report(stream: bool):
    """The report may follow the end of a short answer: it updates the routing policy later."""
    ended = asyncio.Event()

    async def prefill(call: Call, _: int) -> AsyncGenerator[Any, None]:
        p.delivered[json.loads(call.body)[TRANSFER_FIELD]["transfer_id"]].set()
        await ended.wait()
        yield ResponseStart(200, JSON)
        yield b'{"usage": {"prompt_tokens": 17}}'
        await asyncio.sleep(60)

    async def one_body(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, (*JSON, (b"content-length", b"17")))
        yield json.dumps(WHOLE).encode()

    p = Handle([Replica("p0", prefill)])
    d = Handle([Replica("d0", fed(engine(1, [1]) if stream else one_body, p))])
    router = router_of(LIMITS, p, d)
    answer, _ = await ask(router, request(stream))
    assert (answer.route, answer.prompt_tokens) == ("remote", None)
    assert (d.taken, d.running) == (0, 1), "the client's next request needs the slot"
    ended.set()
    await at_rest(p, d)
    assert (answer.prompt_tokens, counted(router, "tandem_prefill_legs_total", outcome="done")) == (17, 1)
    assert p.discarded == []


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
