"""Write a streamed answer to a client: to the router's own port, or through Ray Serve's proxy."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from typing import Any

from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from actors.upstream.uvicorn_protocol import CONNECTION


class SendWriter:
    """ClientWriter over `send`, for Serve's proxy. It is paused while a message is sent."""

    def __init__(self, send: Send) -> None:
        self.on_resume: Callable[[], None] | None = None
        self._send = send
        self._sending: asyncio.Task[None] | None = None

    @property
    def paused(self) -> bool:
        return self._sending is not None

    def write(self, data: bytes) -> None:
        self._sending = asyncio.create_task(self._write(data, self._sending))

    async def _write(self, data: bytes, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        if self._sending is asyncio.current_task():
            self._sending = None
            if self.on_resume is not None:
                self.on_resume()

    async def drained(self) -> None:
        """Wait until everything is sent."""
        if self._sending is not None:
            await self._sending

    async def close(self) -> None:
        """Cancel a `send` that does not return."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait({self._sending})


async def until_disconnect(scope: Scope, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it and raise ClientDisconnect if the client disconnects.

    Returns or raises after `work` has ended.
    """
    if (connection := scope.get(CONNECTION)) is not None:
        await _until_done(connection.disconnected, work)
        return
    # Run `work` in an empty context. Otherwise, when Serve's proxy cancels a request, Ray would
    # also cancel each Ray call of `work`, at any point of that call.
    working = asyncio.create_task(work, context=Context())
    leaving = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        await working
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def _until_done(disconnected: asyncio.Future[None], work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in this task; cancel it and raise ClientDisconnect when `disconnected` is done."""
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"

    def leave(_: asyncio.Future[None]) -> None:
        task.cancel()

    disconnected.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if disconnected.done() and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        disconnected.remove_done_callback(leave)


async def _disconnected(receive: Receive) -> None:
    with suppress(TaskCancelledError):  # Serve's proxy cancels its request on a disconnect
        while (await receive())["type"] != "http.disconnect":
            pass
