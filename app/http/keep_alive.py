"""Send headers and SSE comments to the client of a stream that has no token yet.

Load balancers close idle connections (nginx, AWS: after 60 s).
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

from starlette.types import Message, Send

from actors.errors import DeadlineError
from actors.request import KEEP_ALIVE, Endpoint
from actors.router.client_request import ClientRequest
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


class KeepAlive:
    """Sender of headers, and of a comment every `limits.keep_alive_s` seconds, to one client until
    `stop`.

    The headers and the first comment are sent after the first interval.
    """

    def __init__(self, send: Send, limits: RouterLimits) -> None:
        self.started = False
        """True once this object starts to send status 200 to the client."""
        self._send = send
        self._limits = limits
        self._stopping = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._comments: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def waiting(self, request: ClientRequest) -> AsyncGenerator[None, None]:
        """Send comments until `stop` or the end of the block, if `request` is for a stream.

        Sends none if `limits.keep_alive_s` is None.
        """
        if self._limits.keep_alive_s is not None and _is_stream(request):
            self._timer = asyncio.get_running_loop().call_later(self._limits.keep_alive_s, self._start)
        try:
            yield
        except Exception:
            await self.stop()  # an error event follows
            raise
        finally:
            await self._cancel()

    async def stop(self) -> None:
        """Stop the comments; return when the last one has been sent.

        Raises DeadlineError if the client reads nothing for `idle_timeout_s`.
        """
        if self._timer is not None:
            self._timer.cancel()
        if self._comments is not None:
            # The task ends by itself: after a cancellation it would be unknown whether its message
            # was sent.
            self._stopping.set()
            await self._comments

    async def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._comments is not None:
            self._comments.cancel()
            await asyncio.wait({self._comments})
            if not self._comments.cancelled():
                self._comments.exception()  # retrieve it: asyncio would log it

    def _start(self) -> None:
        self.started = True
        self._comments = asyncio.create_task(self._comment(), name="sse-keep-alive")

    async def _comment(self) -> None:
        await self._deliver({"type": "http.response.start", "status": 200, "headers": HEADERS})
        while not self._stopping.is_set():
            await self._deliver({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            with suppress(TimeoutError):
                async with asyncio.timeout(self._limits.keep_alive_s):
                    await self._stopping.wait()

    async def _deliver(self, message: Message) -> None:
        idle_s = self._limits.idle_timeout_s
        try:
            async with asyncio.timeout(idle_s):
                await self._send(message)
        except TimeoutError:
            raise DeadlineError(f"the client read nothing of the stream for {idle_s:g} s") from None


def _is_stream(request: ClientRequest) -> bool:
    """Return whether the answer to `request` is known to be a stream that gets comments.

    False for JSON values of `stream` other than `true`: vLLM converts some to true (`"true"`) and
    others to false (`"false"`). For a form, `parse_form` has converted the value.
    """
    return request.body.get("stream") is True and request.endpoint in STREAMING
