"""Deadlines of a request: to its first token, between two tokens, and of a whole answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from actors.errors import DeadlineError
from actors.request import Call, Heartbeat, ResponseStart, StreamChunk
from actors.router import answer
from actors.router.router import Router
from testing.answers import body_of
from testing.sse import said
from tests.actors.behaviours import EVENTS, LIMITS, TOKENS, answers, ask, engine, fleet, hangs, request, well
from tests.actors.fleet import at_rest

pytestmark = pytest.mark.usefixtures("virtual_time")

SHORT = {"first_token_timeout_s": 0.3, "idle_timeout_s": 0.3, "request_timeout_s": 0.3}


async def paced(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """Forty tokens in 0.8 s."""
    async for item in engine(1, [1])(call, turn):
        await asyncio.sleep(0.02)
        yield item


async def alive_but_idle(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """One token, then heartbeats only: the engine runs, but no longer schedules this request."""
    async for item in engine(1, [1], dies_after=None)(call, turn):
        yield item
        if not isinstance(item, ResponseStart | bytes):
            break
    while True:
        await asyncio.sleep(0.05)
        yield Heartbeat()


async def test_a_stream_with_tokens_has_no_deadline():
    """A stream with tokens may take longer than every timeout."""
    router, p, d = fleet([well], [paced])
    router.limits = LIMITS.model_copy(update=SHORT)
    _, body = await ask(router, request())
    assert said(body)["text"] == "".join(f"<{token}>" for token in range(TOKENS))
    await at_rest(p, d)


async def test_a_resumed_stream_has_no_deadline():
    """Another engine continues it after the deadline of the first token."""

    async def dies_late(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        begins = True
        async for item in engine(1, [1], dies_after=25)(call, turn):
            yield item
            if begins and isinstance(item, StreamChunk):
                begins = False
                await asyncio.sleep(1.1)

    router, p, d = fleet([well], [dies_late, engine(2, [1])])
    router.limits = LIMITS.model_copy(update={"first_token_timeout_s": 1.0})
    for _ in range(2):
        _, body = await ask(router, request())
        assert said(body)["text"] == "".join(f"<{token}>" for token in range(TOKENS))
    await at_rest(p, d)


async def read_slowly(router: Router, pause_s: float) -> str:
    """Return the text of a stream whose client pauses after each read."""
    body = b""
    async with router.answer(request()) as streamed:
        async for some in body_of(streamed):
            body += some
            await asyncio.sleep(pause_s)
    return str(said(body)["text"])


async def test_a_stream_whose_client_reads_slowly_is_resumed(monkeypatch: pytest.MonkeyPatch):
    """The client takes longer than every timeout for tokens that have arrived before the death."""
    monkeypatch.setattr(answer, "MOST_BYTES", 1)
    router, p, d = fleet([well], [engine(1, [1], dies_after=25), engine(2, [1])])
    router.limits = LIMITS.model_copy(update=SHORT)
    for _ in range(2):
        assert await read_slowly(router, 0.1) == "".join(f"<{token}>" for token in range(TOKENS))
    await at_rest(p, d)


async def test_a_slow_client_leaves_time_to_resume():
    """The client reads the last tokens before the death more slowly than others, within its limit.

    The next engine answers within its limit, too.
    """

    async def starts_late(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0.2)
        async for item in engine(2, [1])(call, turn):
            yield item

    router, p, d = fleet([well], [engine(1, [1], dies_after=25), starts_late])
    router.limits = LIMITS.model_copy(update=SHORT)
    for _ in range(2):
        assert await read_slowly(router, 0.2) == "".join(f"<{token}>" for token in range(TOKENS))
    await at_rest(p, d)


@pytest.mark.parametrize(
    ("limit", "stream", "behaviour"),
    [
        ("first_token_timeout_s", True, hangs),
        ("idle_timeout_s", True, alive_but_idle),
        ("request_timeout_s", False, answers(200, {}, delay_s=60)),
    ],
)
async def test_each_wait_has_a_deadline(limit, stream, behaviour):
    """Each case sets one timeout to a short time."""
    router, p, d = fleet([well], [behaviour])
    router.limits = LIMITS.model_copy(update=dict.fromkeys(SHORT, 20.0) | {limit: 0.3})
    with pytest.raises(DeadlineError):
        async with asyncio.timeout(10):
            await ask(router, request(stream=stream))
    await at_rest(p, d)


async def test_an_event_of_a_stream_before_its_first_token_is_no_token():
    """A comment does not end the wait for the first token."""

    async def comments(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        while True:
            await asyncio.sleep(0.05)
            yield b": ping\n\n"

    router, p, d = fleet([well], [comments])
    router.limits = LIMITS.model_copy(update={"idle_timeout_s": 20.0, "first_token_timeout_s": 0.3})
    with pytest.raises(DeadlineError):
        async with asyncio.timeout(10):
            await ask(router, request(echo=True))
    await at_rest(p, d)
