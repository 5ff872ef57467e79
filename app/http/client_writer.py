"""Write a streamed answer to a client: to the router's own port, or through Ray Serve's proxy."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from actors.errors import DeadlineError
from actors.request import KEEP_ALIVE, Endpoint
from actors.router.client_request import ClientRequest
from actors.upstream.uvicorn_protocol import CONNECTION
from app.http.parsing import FORM_ENDPOINTS
from configs.settings.router import RouterLimits

HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
"""Headers that are known before the engine answers; the content type is that of vLLM's streams."""

STREAMING: frozenset[Endpoint] = FORM_ENDPOINTS | {
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
}
"""Endpoints whose streams get comments: those whose body or form has the field `stream`."""


class SendWriter:
    """ClientWriter over `send`, for Serve's proxy. It is paused while a message is sent."""

    def __init__(self, send: Send) -> None:
        self.on_resume: Callable[[], None] | None = None
        self._send = send
        self._sending: asyncio.Task[None] | None = None
        self._error: Exception | None = None

    @property
    def paused(self) -> bool:
        return self._sending is not None

    def write(self, data: bytes) -> None:
        """Send a part of the body; raises the error of an earlier part."""
        assert self._sending is None, "a relay writes while `paused` is false"
        if self._error is not None:
            raise self._error
        self._sending = asyncio.create_task(self._write(data))

    async def _write(self, data: bytes) -> None:
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except Exception as error:
            self._error = error
        finally:
            self._sending = None
        if self.on_resume is not None:
            self.on_resume()

    async def drained(self) -> None:
        """Wait until everything is sent; raises the error of a `send`."""
        if self._sending is not None:
            await self._sending
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        """Cancel a `send` that does not return."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait({self._sending})


class KeepAlive:
    """Sends headers, and SSE comments, to the client of a stream that has no token yet.

    Load balancers close idle connections (nginx, AWS: after 60 s). The headers and the first
    comment are sent after `limits.keep_alive_s`.
    """

    def __init__(self, send: Send, limits: RouterLimits) -> None:
        self.started = False
        """True once this object starts to send status 200 to the client."""
        self._send = send
        self._limits = limits
        self._stopping = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._comments: asyncio.Task[None] | None = None

    def begin(self, request: ClientRequest) -> None:
        """Send comments until `stop` or `close`, if `request` is for a stream.

        Sends none if `limits.keep_alive_s` is None, or for JSON values of `stream` other than
        `true`: vLLM converts some to true (`"true"`) and others to false (`"false"`).
        """
        interval_s = self._limits.keep_alive_s
        if interval_s is not None and request.body.get("stream") is True and request.endpoint in STREAMING:
            self._timer = asyncio.get_running_loop().call_later(interval_s, self._start)

    async def close(self) -> None:
        """Cancel the comments."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comments is not None:
            self._comments.cancel()
            await asyncio.gather(self._comments, return_exceptions=True)

    async def stop(self) -> None:
        """Stop the comments; return when the last one has been sent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._comments is not None:
            # The task ends by itself: after a cancellation it would be unknown whether its message
            # was sent.
            self._stopping.set()
            await self._comments

    def _start(self) -> None:
        self.started = True
        self._comments = asyncio.create_task(self._comment(), name="sse-keep-alive")

    async def _comment(self) -> None:
        message: Message = {"type": "http.response.start", "status": 200, "headers": HEADERS}
        await self._deliver(message)
        while not self._stopping.is_set():
            await self._deliver({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), self._limits.keep_alive_s)

    async def _deliver(self, message: Message) -> None:
        idle_s = self._limits.idle_timeout_s
        try:
            await asyncio.wait_for(self._send(message), idle_s)
        except TimeoutError:
            raise DeadlineError(f"the client read nothing of the stream for {idle_s:g} s") from None


async def until_disconnect(scope: Scope, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in this task; cancel it and raise ClientDisconnect if the client disconnects."""
    task = asyncio.current_task()
    connection: Any = scope.get(CONNECTION)
    assert task is not None, "a coroutine runs in a task"
    own = asyncio.create_task(_disconnected(receive)) if connection is None else None
    disconnected: asyncio.Future[None] = connection.disconnected if own is None else own
    over = left = False

    def leave(_: asyncio.Future[None]) -> None:
        nonlocal left
        # Serve's proxy cancels the task itself; again, it would interrupt the cleanup of `work`.
        left = not over and not task.cancelling()
        if left:
            task.cancel()

    disconnected.add_done_callback(leave)
    try:
        await work
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        over = True
        disconnected.remove_done_callback(leave)
        if own is not None:
            own.cancel()
            await asyncio.wait({own})


async def _disconnected(receive: Receive) -> None:
    with suppress(TaskCancelledError):  # Serve's proxy cancels its request on a disconnect
        while (await receive())["type"] != "http.disconnect":
            pass
