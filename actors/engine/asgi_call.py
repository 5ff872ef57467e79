"""Run one HTTP request through an ASGI application in this process.

The engine actor hosts vLLM's FastAPI application without a socket: the actor's RPC server receives
the requests. `call_asgi` yields the response as items. Closing or cancelling this generator has the
effect of a client's disconnect.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from contextvars import Context
from typing import Any
from urllib.parse import unquote

from actors.request import Call, Heartbeat, ResponseStart

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Any]

READY_BYTES = 2**16
"""Number of unread body bytes at which the application's `send` waits."""


class Notices:
    """Queue of items that come beside an application's response."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        """Set by each `put`; its reader clears it."""
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)
        self.news.set()

    def beat(self) -> None:
        """Add a heartbeat, unless unread items have the same effect."""
        if not self._items:
            self.put(Heartbeat())

    def pop(self) -> Any:
        return self._items.popleft() if self._items else None

    async def get(self) -> Any:
        while not self._items:
            self.news.clear()
            await self.news.wait()
        return self._items.popleft()


async def call_asgi(
    app: AsgiApp,
    call: Call,
    disconnect_s: float = 10.0,
    context: Context | None = None,
    notices: Notices | None = None,
) -> AsyncGenerator[Any, None]:
    """Yield the start of the response, its body, and the items of `notices`.

    A response start or body that is ready precedes notices. Joins the body bytes that arrive
    between two reads. If the generator is closed early, the application receives
    `http.disconnect`, and is cancelled if it still runs after `disconnect_s` seconds. Raises the
    application's exception after the items.
    """
    start: ResponseStart | None = None
    body: list[bytes] = []
    body_bytes = 0
    notices = Notices() if notices is None else notices
    news, room = notices.news, asyncio.Event()
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

    run = asyncio.create_task(serve(), context=context)
    run.add_done_callback(lambda _: news.set())
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
            elif (notice := notices.pop()) is not None:
                yield notice
            elif run.done():
                break
            else:
                news.clear()
                await news.wait()
        await run
    finally:
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
