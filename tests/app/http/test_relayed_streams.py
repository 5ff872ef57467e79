"""Streams on the router's port: real sockets, whose writes wake no task."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.errors import EngineDownError
from actors.request import Call, ResponseStart, TokenChunk
from app.http.http_server import HttpServer
from app.http.routes import build_http
from testing.ports import free_port
from tests.actors.behaviours import EVENTS, LIMITS, fleet, well
from tests.actors.fleet import SOURCE, Handle
from tests.actors.rpc.world import until
from tests.app.http.servers import HOST, WAIT_S

EVENT_BYTES = 20_000


def event(number: int) -> bytes:
    return b'data: {"choices":[{"text":"%d"}],"pad":"%s"}\n\n' % (number, b"x" * EVENT_BYTES)


def pours(events: int, dies_after: int | None = None, pause_s: float = 0.0) -> Any:
    """Return a decode engine that streams `events` large events, and repeats a replay log first."""

    async def serve(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        for number in range(events):
            if number == dies_after and not call.replay_log:
                raise EngineDownError("killed")
            yield TokenChunk(event(number), ((number,),), source=SOURCE)
            await asyncio.sleep(pause_s)
        yield b"data: [DONE]\n\n"

    return serve


@asynccontextmanager
async def served(decode: list[Any], **limits: Any) -> AsyncGenerator[tuple[int, Any, Handle], None]:
    """Run a router's HTTP server over in-process engines; yield its port and its side of them."""
    router, _, d = fleet([well] * len(decode), decode)
    router.limits = LIMITS.model_copy(update=limits)
    lines: list[str] = []
    app: Any = build_http(router, access_log=lines.append)  # type: ignore[arg-type]
    server = HttpServer(app, HOST, port := free_port(), 0.0, "ours")
    await server.open()
    try:
        yield port, lines, d
    finally:
        await server.close()


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect with a small receive buffer, so that an unread stream soon fills all buffers."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (HOST, port))
    return await asyncio.open_connection(sock=connection, limit=2**14)


def request(version: str, close: bool) -> bytes:
    body = json.dumps({"prompt": "a prompt", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: tandem\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + (b"Connection: close\r\n\r\n" if close else b"\r\n") + body


async def answer(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    if b"transfer-encoding: chunked" not in head:
        return await reader.read(-1)
    body = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        body += await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"
    return body


@pytest.mark.parametrize(
    ("version", "requests", "pause_s", "decode", "events"),
    [
        ("1.1", 2, 0.0, [pours(5)], 5),
        ("1.0", 1, 0.0, [pours(5)], 5),
        ("1.1", 1, 0.5, [pours(400)], 400),
        ("1.1", 2, 0.3, [pours(300, dies_after=200)] * 2, 300),
    ],
    ids=["two on one connection", "HTTP/1.0", "a client that pauses", "an engine dies while the client pauses"],
)
async def test_a_stream_arrives_whole(
    version: str, requests: int, pause_s: float, decode: list[Any], events: int
) -> None:
    """The client receives every event once, however it reads; the access log counts the bytes."""
    async with served(decode) as (port, lines, d):
        reader, writer = await connect(port)
        for number in range(requests):
            writer.write(request(version, close=number == requests - 1))
            await asyncio.sleep(pause_s)
            body = await asyncio.wait_for(answer(reader), WAIT_S)
            assert body == b"".join(map(event, range(events))) + b"data: [DONE]\n\n"
            assert json.loads(lines[number])["sent_bytes"] == len(body)
        writer.close()
        assert (d.taken, d.running) == (0, 0)


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "reads nothing"])
async def test_a_client_that_takes_no_more_gives_back_its_slots(leaves: bool) -> None:
    """After a disconnect, or after `idle_timeout_s` without a read, no call runs."""
    async with served([pours(10_000, pause_s=0.001)], idle_timeout_s=60.0 if leaves else 0.5) as (port, lines, d):
        reader, writer = await connect(port)
        writer.write(request("1.1", close=True))
        await reader.readuntil(b"pad")
        if leaves:
            writer.transport.abort()
        await until(lambda: not d.taken and not d.running)
        writer.transport.abort()
        await until(lambda: bool(lines))
        assert json.loads(lines[0])["sent_bytes"] > EVENT_BYTES
