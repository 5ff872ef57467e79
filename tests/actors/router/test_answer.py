"""A stream's data for the client: the first token at once, later ones together if they arrive
together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from actors.errors import EngineDownError, EngineError
from actors.request import Call, FirstTokenChunk, Heartbeat, ResponseStart, StreamChunk, TokenChunk
from actors.router.answer import Answer
from actors.telemetry.router_metrics import RouterMetrics
from configs.settings.router import RouterLimits
from testing.answers import body_of
from tests.actors.behaviours import EVENTS, fleet, request, well
from tests.actors.fleet import SOURCE, at_rest

pytestmark = pytest.mark.usefixtures("virtual_time")


def token(number: int) -> StreamChunk:
    return TokenChunk(b'data: {"choices": [{"index": 0, "text": "%d"}]}\n\n' % number, ((number,),), source=SOURCE)


DONE = TokenChunk(b"data: [DONE]\n\n", ())


async def pieces(decode: Any) -> list[int]:
    """Return the number of events in each piece of the answer."""
    router, p, d = fleet([well], [decode])
    async with router.answer(request()) as answer:
        found = []
        async for piece in body_of(answer):
            assert piece.endswith(b"\n\n")
            found.append(piece.count(b"data: "))
            await asyncio.sleep(0.02)  # a reading client, while all ready data arrives
    await at_rest(p, d)
    return found


async def test_what_comes_at_once_goes_on_at_once() -> None:
    """The first event is a separate piece, because clients wait for it; the rest is one piece."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        for number in range(10):
            yield token(number)
        yield DONE

    assert await pieces(serve) == [1, 10]


async def test_what_comes_one_by_one_goes_on_one_by_one() -> None:
    """No token waits for the next."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        for number in range(4):
            yield token(number)
            await asyncio.sleep(0.1)
        yield DONE

    assert await pieces(serve) == [1, 1, 1, 1, 1]


async def test_a_sign_of_life_holds_no_token_up() -> None:
    """A heartbeat may arrive with a token in one read, and the next token much later."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield token(0)
        await asyncio.sleep(0.1)
        yield Heartbeat()
        yield token(1)
        yield Heartbeat()
        await asyncio.sleep(0.1)
        yield DONE

    assert await pieces(serve) == [1, 1, 1]


async def test_what_is_put_together_has_bounds() -> None:
    """A client that stops reading for a while gets the accumulated data in pieces; others are
    served between them.
    """

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        for number in range(20):
            yield TokenChunk(b'data: {"choices": [{"index": 0, "text": "%s"}]}\n\n' % (b"x" * 20_000), ((number,),))
        yield DONE

    found = await pieces(serve)
    assert max(found[1:]) <= 5
    assert sum(found) == 21


async def test_nothing_that_came_before_a_death_is_lost() -> None:
    """Data that arrived with the report of the death is sent, and another engine continues after
    it.
    """
    known: list[int] = []

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        known.append(len(call.replay_log))
        yield ResponseStart(200, EVENTS)
        for number in range(6 if len(known) == 1 else 10):
            yield token(number)
        if len(known) == 1:
            raise EngineDownError("killed")
        yield DONE

    router, p, d = fleet([well] * 2, [serve] * 2)
    async with router.answer(request()) as answer:
        body = b""
        async for piece in body_of(answer):
            body += piece
            await asyncio.sleep(0.02)
    assert [text.split(b'"')[0] for text in body.split(b'"text": "')[1:]] == [b"%d" % number for number in range(10)]
    assert known == [0, 6]
    await at_rest(p, d)


async def test_nothing_that_came_before_an_error_is_lost() -> None:
    """An engine that fails in mid-stream: the client receives everything before the failure."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        for number in range(6):
            yield token(number)
        raise EngineError("failed")

    router, p, d = fleet([well], [serve])
    found: list[bytes] = []

    async def read() -> None:
        async with router.answer(request()) as answer:
            async for piece in body_of(answer):
                found.append(piece)
                await asyncio.sleep(0.02)

    with pytest.raises(EngineError):
        await read()
    assert b"".join(found).count(b"data: ") == 6
    await at_rest(p, d)


async def test_nothing_is_read_after_the_last_event() -> None:
    """Prefill's only token has ended the answer, before decode refuses the request."""
    events = b'data: {"t":1}\n\n', b'data: {"finish":"length"}\n\ndata: [DONE]\n\n'
    first = FirstTokenChunk(events[0], ((5,),), None, 3, b"digest", SOURCE)
    items: Any = deque([first, events[1], ResponseStart(400, ((b"content-type", b"application/json"),)), b"{}"])
    call: Any = SimpleNamespace(has_items=False, over=False, error=None, heard=False, reader=None)
    writer: Any = SimpleNamespace(paused=False, on_resume=None, write=None)
    dispatcher: Any = SimpleNamespace(
        request=request(), limits=RouterLimits(), age_s=0.0, model=SimpleNamespace(metrics=RouterMetrics())
    )
    attempt: Any = SimpleNamespace(items=items, call=call)
    assert await Answer(dispatcher, attempt).relay(writer) == b"".join(events)
