"""Run one HTTP request through an ASGI application in this process.

The engine actor hosts vLLM's FastAPI application without a socket: the actor's RPC server receives
the requests. `call_asgi` yields the response as items. Closing or cancelling this generator has the
effect of a client's disconnect.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextlib import ExitStack
from contextvars import Context
from typing import Any
from urllib.parse import unquote

from actors.engine.heartbeat import HeartbeatMonitor
from actors.request import Call, Heartbeat, ResponseStart

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]

READY_BYTES = 2**16
"""Number of unread body bytes at which the application's `send` waits."""


async def call_asgi(
    app: AsgiApp,
    call: Call,
    disconnect_s: float = 10.0,
    context: Context | None = None,
    heartbeats: HeartbeatMonitor | None = None,
    first_token: asyncio.Future[None] | None = None,
) -> AsyncGenerator[ResponseStart | bytes | Heartbeat, None]:
    """Yield the start of the response, its body, and `Heartbeat` items from `heartbeats`.

    When `first_token` is done, a Heartbeat with `tokens` follows. A response start or body that is
    ready precedes heartbeats. Joins the body bytes that arrive between two reads; the application's
    `send` waits while READY_BYTES or more are unread. The application runs in `context`, by default
    a copy of the caller's context. If the generator is closed early, the application receives
    `http.disconnect`, and is cancelled if it still runs after `disconnect_s` seconds. Raises the
    application's exception after the items.
    """
    start: ResponseStart | None = None
    body: list[bytes] = []
    body_bytes = 0
    beats = tokens = False
    news, room = asyncio.Event(), asyncio.Event()
    room.set()
    disconnected = asyncio.Event()
    inbox: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal start, body_bytes
        if message["type"] == "http.response.start":
            start = ResponseStart(message["status"], tuple(map(tuple, message.get("headers", ()))))
        elif piece := message.get("body", b""):
            body.append(piece)
            body_bytes += len(piece)
        news.set()
        if body_bytes >= READY_BYTES and not disconnected.is_set():
            room.clear()
            await room.wait()

    async def serve() -> None:
        await app(_scope(call), receive, send)

    def beat() -> None:
        nonlocal beats
        beats = True
        news.set()

    def report(_: asyncio.Future[None]) -> None:
        nonlocal tokens
        tokens = True
        news.set()

    run = asyncio.create_task(serve(), context=context)
    run.add_done_callback(lambda _: news.set())
    if first_token is not None:
        first_token.add_done_callback(report)
    stack = ExitStack()
    if heartbeats is not None:
        stack.enter_context(heartbeats.subscribed(beat))
    try:
        while True:
            if start is not None:
                first, start = start, None
                yield first
            elif body:
                ready, body_bytes = b"".join(body), 0
                body.clear()
                room.set()
                yield ready
            elif beats or tokens:
                beat_now, beats, tokens = Heartbeat(tokens), False, False
                yield beat_now
            elif run.done():
                break
            else:
                news.clear()
                await news.wait()
        await run
    finally:
        stack.close()
        if not run.done():
            disconnected.set()
            room.set()
            await asyncio.wait({run}, timeout=disconnect_s)
            run.cancel()
            await asyncio.wait({run})


def _scope(call: Call) -> Message:
    path, _, query = call.path.partition("?")
    return {
        "type": "http",
        # With spec version 2.4 or later, Starlette (responses.py) detects a disconnect only in
        # `send`, but an engine may compute for a long time before it sends anything.
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": list(call.headers),
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
