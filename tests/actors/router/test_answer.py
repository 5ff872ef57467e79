"""A stream's data for the client: the first token at once, later ones together if they arrive
together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from actors.errors import EngineDownError, EngineError, TandemError
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
LARGE = TokenChunk(b'data: {"choices": [{"index": 0, "text": "%s"}]}\n\n' % (b"x" * 20_000), ((0,),))


def scripted(items: list[Any], after_a_death: list[Any] | None = None) -> Any:
    """Return a decode engine that sends `items`, pauses for numbers, and raises exceptions."""

    async def serve(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        for item in after_a_death if after_a_death is not None and call.replay_log else items:
            if isinstance(item, Exception):
                raise item
            if isinstance(item, float):
                await asyncio.sleep(item)
            else:
                yield item

    return serve


TOKENS = [token(number) for number in range(10)]


@pytest.mark.parametrize(
    ("items", "pieces"),
    [
        # The first event is a separate piece, because clients wait for it; the rest is one piece.
        ([*TOKENS, DONE], [1, 10]),
        # No token waits for the next, also if a heartbeat arrives with it.
        ([item for one in TOKENS[:4] for item in (one, 0.1)] + [DONE], [1] * 5),
        ([TOKENS[0], 0.1, Heartbeat(), TOKENS[1], Heartbeat(), 0.1, DONE], [1, 1, 1]),
        # A client that stops reading gets bounded pieces; others are served between them.
        ([LARGE] * 20 + [DONE], [1, 4, 4, 4, 4, 4]),
        # What arrived before a death or an error is sent, and another engine continues after it.
        ([*TOKENS[:6], EngineDownError("killed")], [1, 5, 5]),
        ([*TOKENS[:6], EngineError("failed")], [1, 5]),
    ],
    ids=["at once", "one by one", "heartbeats", "large", "death", "error"],
)
async def test_pieces_of_a_stream(items: list[Any], pieces: list[int]) -> None:
    serve = scripted(items, [*TOKENS, DONE])
    router, p, d = fleet([well] * 2, [serve] * 2)
    found: list[bytes] = []

    async def read() -> None:
        async with router.answer(request()) as answer:
            async for piece in body_of(answer):
                found.append(piece)
                await asyncio.sleep(0.02)  # a reading client, while all ready data arrives

    with pytest.raises(EngineError) if isinstance(items[-1], EngineError) else nullcontext():
        await read()
    assert all(piece.endswith(b"\n\n") for piece in found)
    assert [piece.count(b"data: ") for piece in found] == pieces
    texts = [text.split(b'"')[0] for text in b"".join(found).split(b'"text": "')[1:]]
    assert items[0] is LARGE or texts == [b"%d" % number for number in range(len(texts))]
    await at_rest(p, d)


def answer_of(call: Any, items: deque[Any], limits: RouterLimits) -> Answer:
    """Return the answer of an attempt that has begun with `items`."""

    def fail(error: Exception) -> None:
        raise error

    model = SimpleNamespace(metrics=RouterMetrics())
    dispatcher: Any = SimpleNamespace(request=request(), limits=limits, age_s=0.0, model=model, decode_failed=fail)
    attempt: Any = SimpleNamespace(items=items, call=call, on_prefill=None)
    return Answer(dispatcher, attempt)


@pytest.mark.parametrize(
    ("paused", "heard", "ends", "told"),
    [
        (0, 0, 2, "engine sent nothing"),
        (0, 99, 10, "engine sent no data"),
        # The engine's items are not read while the client takes none: its limits begin anew.
        (5, 0, 6, "engine sent nothing"),
        (5, 99, 14, "engine sent no data"),
        (99, 99, 10, "client read nothing"),
    ],
)
async def test_limits_of_a_stream(paused: int, heard: int, ends: int, told: str) -> None:
    """In seconds; the client pauses and the engine is heard before these times."""
    call: Any = SimpleNamespace(has_items=False, over=False, error=None, heard=False, reader=None)
    writer: Any = SimpleNamespace(paused=True, on_resume=None, write=None)
    limits = RouterLimits().model_copy(update={"silence_timeout_s": 2, "idle_timeout_s": 10})
    answer, start = answer_of(call, deque(), limits), asyncio.get_running_loop().time()
    running = asyncio.create_task(answer.relay(writer))
    for now in range(ends + 1):
        await asyncio.sleep(0)
        assert not running.done(), now
        writer.paused, call.heard = now < paused, now < heard
        answer.check(start + now)
    with pytest.raises(TandemError, match=told):
        await running


async def test_nothing_is_read_after_the_last_event() -> None:
    """Prefill's only token has ended the answer, before decode refuses the request."""
    events = b'data: {"t":1}\n\n', b'data: {"finish":"length"}\n\ndata: [DONE]\n\n'
    first = FirstTokenChunk(events[0], ((5,),), None, 3, b"digest", SOURCE)
    items: Any = deque([first, events[1], ResponseStart(400, ((b"content-type", b"application/json"),)), b"{}"])
    call: Any = SimpleNamespace(has_items=False, over=False, error=None, heard=False, reader=None)
    writer: Any = SimpleNamespace(paused=False, on_resume=None, write=None)
    assert await answer_of(call, items, RouterLimits()).relay(writer) == b"".join(events)
