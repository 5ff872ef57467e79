"""Silent engines: the router leaves dead ones, and waits for slow ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any

import pytest

from actors.errors import EngineDownError
from actors.request import TRANSFER_FIELD, Call, Heartbeat
from testing.sse import said
from tests.actors.behaviours import (
    LIMITS,
    OK,
    TOKENS,
    WHOLE,
    answers,
    ask,
    counted,
    engine,
    fleet,
    hangs,
    prefills,
    request,
    transfers,
    well,
)
from tests.actors.fleet import Handle, Replica, at_rest

pytestmark = pytest.mark.usefixtures("virtual_time")


def frozen(after: int) -> Any:
    """Return a decode engine that stops sending after some tokens, as a stopped process does."""

    async def serve(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        if after:
            with suppress(EngineDownError):
                async for item in engine(1, [2], after)(call, turn):
                    yield item
        await asyncio.sleep(60)

    return serve


@pytest.mark.parametrize("after", [0, 10], ids=["before its first byte", "in mid-stream"])
async def test_a_stream_outlives_a_silent_engine(after):
    """The router does not call the silent engine again; another one sends the remaining tokens."""
    router, p, d = fleet([well], [frozen(after), engine(2, [3])])
    router.limits = LIMITS.model_copy(update={"silence_timeout_s": 0.5})
    for _ in range(2):
        _, body = await ask(router, request())
        assert said(body)["text"] == "".join(f"<{token}>" for token in range(TOKENS))
    await at_rest(p, d)
    assert len(d.replicas[0].calls) == 1


async def test_a_transfer_that_hangs_is_left_with_both_its_ends():
    """The prompt was computed and decode is silent: other engines, then decode alone, which did
    not fail.
    """
    router, p, d = fleet([well] * 3, [])
    d.replicas = [Replica(f"d{n}", blocked) for n in range(2)]
    router.limits = LIMITS.model_copy(update={"silence_timeout_s": 0.05})
    answer, body = await ask(router, request())
    await at_rest(p, d)
    assert (answer.local_reason, said(body)["finish_reason"]) == ("prefill_failed", "length")
    assert (len(p.calls), len(set(transfers(p)))) == (3, 3)


async def blocked(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """A decode engine that hangs in each transfer."""
    if TRANSFER_FIELD.encode() in call.body:
        await asyncio.sleep(60)
    async for item in engine(1, [3])(call, turn):
        yield item


def queued(serve: Any, at: int = 0) -> Any:
    """Return an engine that delays its item `at` by four seconds and sends heartbeats meanwhile."""

    async def wait(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        number = 0
        async for item in serve(call, turn):
            if number == at:
                for _ in range(40):
                    await asyncio.sleep(0.1)
                    yield Heartbeat()
            number += 1
            yield item

    return wait


async def test_a_slow_engine_that_lives_is_not_given_up():
    """A request may wait in an engine's queue for longer than any timeout: its engine sends
    heartbeats.
    """
    whole, stream = answers(200, WHOLE), engine(1, [2])
    cases = [
        (queued(whole), False),
        (queued(whole, at=1), False),
        (queued(stream), True),
        (queued(stream, at=10), True),
    ]

    async def one(prefill: list[Any], serve: Any, stream: bool) -> tuple[Handle, Handle]:
        router, p, d = fleet(prefill, [serve, serve])
        router.limits = LIMITS.model_copy(update={"silence_timeout_s": 3.0})
        _, body = await ask(router, request(stream=stream))
        assert said(body)["text"].endswith("<39>") if stream else json.loads(body) == WHOLE
        assert (len(p.calls), len(d.calls)) == (len(prefill), 1)
        return p, d

    handles = await asyncio.gather(*(one(prefill, *case) for prefill in ([well], []) for case in cases))
    await at_rest(*(handle for pair in handles for handle in pair))


@pytest.mark.parametrize("prefill", [[well] * 2, []], ids=["remote", "local"])
async def test_an_answer_outlives_a_silent_engine(prefill):
    """Another engine answers a request that is not streamed: no part of the answer was sent."""
    router, p, d = fleet(prefill, [frozen(0), OK])
    router.limits = LIMITS.model_copy(update={"silence_timeout_s": 0.5})
    for _ in range(2):
        _, body = await ask(router, request(stream=False))
        assert json.loads(body) == WHOLE
    await at_rest(p, d)
    assert len(d.replicas[0].calls) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hung_decode_engine_gets_no_more_requests(stream):
    """The hung engine seems idle; the requests after the first silence go to other engines."""
    router, p, d = fleet([well], [hangs, engine(2, [3]) if stream else OK])
    router.limits = LIMITS.model_copy(update={"silence_timeout_s": 0.3})
    for _ in range(6):
        answer, _ = await ask(router, request(stream))
        assert answer.pair.decode == "d1"
    await at_rest(p, d)
    assert len(d.replicas[0].calls) == 1


async def test_a_hung_prefill_engine_gets_no_more_requests():
    """The silence ends the prefill leg, long before `prefill_timeout_s`."""
    router, p, d = fleet([hangs, well], [OK])
    router.limits = LIMITS.model_copy(update={"silence_timeout_s": 0.3})
    async with asyncio.timeout(60):
        for _ in range(6):
            answer, _ = await ask(router, request(False))
            assert (answer.route, answer.pair.prefill) == ("remote", "p1")
    await at_rest(p, d)
    assert len(p.replicas[0].calls) == 1


async def test_a_long_prompt_is_not_taken_for_a_silent_engine():
    """Prefill sends heartbeats while it computes; after its answer it sends nothing until the KV
    has moved.
    """

    async def held(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        for _ in range(10):
            await asyncio.sleep(0.3)
            yield Heartbeat()
        async for item in prefills(lambda: p)(call, turn):
            yield item

    async def slow(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        for _ in range(10):
            await asyncio.sleep(0.3)
            yield Heartbeat()
        async for item in OK(call, turn):
            yield item

    router, p, d = fleet([held], [slow])
    router.limits = LIMITS.model_copy(update={"silence_timeout_s": 2.0})
    answer, _ = await ask(router, request(False))
    assert (answer.route, len(p.calls), len(d.calls)) == ("remote", 1, 1)
    await at_rest(p, d)


async def test_an_engine_that_is_silent_after_its_first_token():
    """Decode has the KV, so only decode has failed."""

    async def stops(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield Heartbeat(tokens=True)
        await asyncio.sleep(60)

    router, p, d = fleet([well], [stops, OK])
    d.in_order = True
    d.replicas.reverse()
    router.limits = LIMITS.model_copy(update={"silence_timeout_s": 0.3})
    answer, body = await ask(router, request(False))
    assert (answer.route, json.loads(body)) == ("remote", WHOLE)
    assert [len(replica.calls) for replica in (*d.replicas, *p.replicas)] == [1, 1, 2]
    assert counted(router, "tandem_retries_total", leg="decode", reason="unavailable") == 1
    await at_rest(p, d)
