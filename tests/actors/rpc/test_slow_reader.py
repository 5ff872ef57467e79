"""A router that stops reading one stream: the engine's generator waits, and other streams
continue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableMapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

from actors.engine.asgi_call import call_asgi
from actors.request import Accepted, Call
from actors.rpc.messages import RpcRequest
from tests.actors.rpc.world import WAIT_S, World, items, settled

EVENTS, EVENT_BYTES = 24_000, 700
"""16.8 MB: a stream with logprobs, or 128 answers at once."""
MOST_BYTES = 4 * 10**6


class Application:
    """Stream events as fast as `send` returns, after the headers of a stream."""

    def __init__(self) -> None:
        self.sent_bytes = 0

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number in range(EVENTS if scope["path"] == "large" else 100):
            await send({"type": "http.response.body", "body": b"x" * EVENT_BYTES, "more_body": True})
            self.sent_bytes += EVENT_BYTES if scope["path"] == "large" else 0
            if number % 50 == 0:
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def test_a_paused_stream_stops_its_generator_only(world: World) -> None:
    """At most MOST_BYTES are in flight, no piece takes long to join, and another stream ends
    meanwhile.
    """
    application = Application()

    async def serve(request: RpcRequest, _: Any) -> AsyncGenerator[Any, None]:
        yield Accepted("e", 1)
        async with aclosing(call_asgi(application, request.call)) as answer:
            async for item in answer:
                yield item

    world.served.instead = serve
    async with AsyncExitStack() as stack:
        slow = await world.call("large", stack)
        first = [await anext(slow), await anext(slow), await anext(slow)]
        before = await settled(lambda: application.sent_bytes)
        assert before < MOST_BYTES
        other = await items(await world.call("small", stack))
        assert sum(len(item) for item in other if isinstance(item, bytes)) == 100 * EVENT_BYTES
        assert application.sent_bytes == before, "the slow stream made no progress"
        pieces = [item for item in first + await items(slow) if isinstance(item, bytes)]
    assert sum(map(len, pieces)) == EVENTS * EVENT_BYTES
    assert max(map(len, pieces)) < 2**18, "joining such a piece takes microseconds"
    await world.at_rest()


async def test_a_cancelled_call_wakes_its_application(world: World) -> None:
    """An application that waits in `send` ends when its reader disconnects."""
    ended = asyncio.Event()

    async def application(scope: Any, receive: Any, send: Any) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while (await asyncio.wait_for(receive(), None))["type"] != "http.disconnect":
                for _ in range(1000):
                    await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        finally:
            ended.set()

    answer = call_asgi(application, Call("POST", "/"), disconnect_s=2 * WAIT_S)
    await anext(answer)
    await anext(answer)
    await asyncio.wait_for(answer.aclose(), WAIT_S)
    assert ended.is_set()
