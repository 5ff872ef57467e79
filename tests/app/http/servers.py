"""Run the router's HTTP server with a small application, and send requests to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.router.client_request import ClientRequest
from actors.upstream.uvicorn_protocol import CONNECTION
from app.http.http_server import HttpServer
from app.http.routes import build_http
from tests.actors.behaviours import JSON

HOST = "127.0.0.1"
KEY = "of-a-client"
LEAVE_S = 0.5
WAIT_S = 60
"""Time limit in seconds for events that must happen, far above any pause of the machine."""

LARGE_BYTES = 2**25
"""Size of an answer that does not fit into the buffers of a connection."""

HEAD = b"GET / HTTP/1.1\r\nHost: tandem\r\n"


def http(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=WAIT_S)


def client_of(router: Any, *keys: Any, **options: Any) -> httpx.AsyncClient:
    """Return a client of the application before this router, without a socket."""
    app: Any = build_http(router, *keys, **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://tandem")


class Client:
    """One connection: sends `wanted` in two pieces, records the answer, and may disconnect.

    ``own_port``  whether it is a connection to the router's port, not to Serve's proxy
    """

    def __init__(self, wanted: ClientRequest, own_port: bool = False, **headers: str) -> None:
        self.starts: list[dict[str, Any]] = []
        self.pieces: list[bytes] = []
        self.ended = False
        self.left = asyncio.Event()
        half = len(wanted.raw) // 2
        self._pieces = [(wanted.raw[half:], False), (wanted.raw[:half], True)]
        more = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": wanted.endpoint,
            "headers": [(b"authorization", b"Bearer " + KEY.encode()), *(wanted.headers or JSON), *more],
            "query_string": b"",
        }
        self.disconnected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.on_resume: Callable[[], None] | None = None
        self.paused = False
        if own_port:
            self.scope[CONNECTION] = self

    def serve(self, router: Any, *keys: Any, **options: Any) -> asyncio.Task[None]:
        """Start to serve the request by the application before this router."""
        app: Any = build_http(router, *keys, **options)
        return asyncio.create_task(app(self.scope, self.receive, self.send))

    @property
    def status(self) -> int | None:
        return self.starts[0]["status"] if self.starts else None

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.starts[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    def leave(self) -> None:
        self.left.set()
        if not self.disconnected.done():
            self.disconnected.set_result(None)

    def write(self, data: bytes) -> None:
        """Take a part of the body, as a connection to the router's port."""

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        if self._pieces and not self.left.is_set():
            body, more = self._pieces.pop()
            return {"type": "http.request", "body": body, "more_body": more}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        await asyncio.sleep(0)
        if message["type"] == "http.response.start":
            self.starts.append(message)
        else:
            self.pieces.append(message["body"])
            self.ended = not message.get("more_body", False)


class Behind:
    """An application that answers with its name. `/slow` ends its answer when `go_on` is set."""

    def __init__(self, name: str) -> None:
        self.go_on = asyncio.Event()
        self.left = asyncio.Event()

        async def named(_: Request) -> Response:
            return PlainTextResponse(name)

        async def slow(_: Request) -> Response:
            async def pieces() -> AsyncGenerator[str, None]:
                yield name
                try:
                    await self.go_on.wait()
                except asyncio.CancelledError:
                    self.left.set()
                    raise
                yield " has ended"

            return StreamingResponse(pieces())

        async def length(request: Request) -> Response:
            return PlainTextResponse(str(len(await request.body())))

        async def refuse(_: Request) -> Response:
            return PlainTextResponse("no", 403)

        async def large(_: Request) -> Response:
            async def pieces() -> AsyncGenerator[bytes, None]:
                try:
                    for _ in range(LARGE_BYTES // 2**16):
                        yield bytes(2**16)
                finally:
                    self.left.set()

            return StreamingResponse(pieces())

        self.app = Starlette(
            routes=[
                Route("/", named),
                Route("/slow", slow),
                Route("/length", length, methods=["POST"]),
                Route("/refuse", refuse, methods=["POST"]),
                Route("/large", large),
            ]
        )


@asynccontextmanager
async def opened(
    behind: Behind, port: int, service: str = "ours", unread_s: float = WAIT_S, idle_s: float = WAIT_S
) -> AsyncGenerator[HttpServer, None]:
    server = HttpServer(behind.app, HOST, port, LEAVE_S, service, unread_s=unread_s, idle_s=idle_s)
    await server.open()
    try:
        yield server
    finally:
        await server.close()


async def answers(port: int, count: int) -> set[str]:
    """Send `count` requests, each on its own connection; return the distinct answers."""
    found = set()
    for _ in range(count):
        async with http(port) as client:
            found.add((await client.get("/")).text)
    return found


async def said_until_closed(port: int, pieces: Iterable[bytes], pause_s: float = 0.0) -> tuple[bytes, float]:
    """Send `pieces`; return the bytes received until the connection closes, and that time in s."""
    began_at = time.monotonic()
    reader, writer = await asyncio.open_connection(HOST, port)

    async def send() -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause_s)

    sending = asyncio.create_task(send())
    said = b""
    try:
        async with asyncio.timeout(WAIT_S):
            while more := await reader.read(65536):
                said += more
    except ConnectionError:
        pass  # the server closed the connection during a send
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    return said, time.monotonic() - began_at
