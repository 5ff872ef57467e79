"""Runs one HTTP request through an ASGI application in this process.

The engine actor hosts vLLM's FastAPI application without a socket. Requests arrive at the actor's
RPC server; the response goes back as a `ResponseStart` followed by bytes. Closing or cancelling the
generator is the client's disconnect.
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

ALIVE = "tandem.alive"
"""Type of a message that ASGI does not have: a heartbeat of the engine."""


async def call_asgi(
    app: AsgiApp,
    call: Call,
    disconnect_s: float = 10.0,
    context: Context | None = None,
    heartbeats: HeartbeatMonitor | None = None,
) -> AsyncGenerator[ResponseStart | bytes | Heartbeat, None]:
    """Yield the start of the response, then its body, and a `Heartbeat` for each one of
    `heartbeats`.

    Bytes that arrive between two reads are joined. The application runs in `context`, or in a copy
    of the caller's. If the reader leaves first, the application receives `http.disconnect` and is
    cancelled after `disconnect_s` seconds.
    """
    outbox: asyncio.Queue[Message | None] = asyncio.Queue()
    disconnected = asyncio.Event()
    inbox: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if inbox:
            return inbox.pop()
        await disconnected.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        outbox.put_nowait(message)

    async def serve() -> None:
        await app(_scope(call), receive, send)

    run = asyncio.create_task(serve(), context=context)
    run.add_done_callback(lambda _: outbox.put_nowait(None))
    stack = ExitStack()
    if heartbeats is not None:
        stack.enter_context(heartbeats.subscribed(lambda: outbox.put_nowait({"type": ALIVE})))
    try:
        while (message := await outbox.get()) is not None:
            if message["type"] == ALIVE:
                yield Heartbeat()
            elif message["type"] == "http.response.start":
                yield ResponseStart(message["status"], tuple(message.get("headers", ())))
            elif message["type"] == "http.response.body":
                body = message.get("body", b"") + _ready_body(outbox)
                if body:
                    yield body
        await run
    finally:
        stack.close()
        if not run.done():
            disconnected.set()
            await asyncio.wait({run}, timeout=disconnect_s)
            run.cancel()
            await asyncio.wait({run})


def _ready_body(outbox: asyncio.Queue[Message | None]) -> bytes:
    """Return the body bytes queued in `outbox`; the end mark stays queued."""
    ready = b""
    while not outbox.empty():
        message = outbox.get_nowait()
        if message is None:
            outbox.put_nowait(None)
            break
        ready += message.get("body", b"")
    return ready


def _scope(call: Call) -> Message:
    path, _, query = call.path.partition("?")
    return {
        "type": "http",
        # From spec version 2.4 on, Starlette detects a disconnect only in `send`, which is too late
        # here.
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
