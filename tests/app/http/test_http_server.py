"""The router's HTTP server and its port, on real sockets and with a small application."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from typing import Any

import httptools
import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import httptools_impl

from actors.upstream import uvicorn_protocol
from actors.upstream.uvicorn_protocol import CONNECTION
from app.http import http_server
from app.http.http_server import HttpServer, PortTakenError
from connectors.errors import ConfigurationError
from connectors.open_files import FEW
from testing.ports import free_port
from tests.app.http.servers import HOST, LEAVE_S, WAIT_S, Behind, answers, opened, said_until_closed


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine does not end a router's question to the listener of its port."""
    monkeypatch.setattr(http_server, "ASK_S", WAIT_S)


@pytest.fixture
def tries_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine is not the end of a router's attempts to share its port."""
    monkeypatch.setattr(http_server, "SETTLES_S", 12.0)


async def test_few_open_files_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    """At the limit itself, the event loop would close connections without an error."""
    port = free_port()
    async with opened(Behind("first"), port):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        os.close(free := os.dup(0))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free + FEW, hard))
        try:
            await answers(port, 1)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert f"nearly all of the {free + FEW} files" in caplog.text


async def exchange(port: int, request: str) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(request.encode())
    answer = await asyncio.wait_for(reader.read(), WAIT_S)
    writer.close()
    return answer


@pytest.mark.parametrize("keep_alive", ["", "Connection: keep-alive\r\n"])
async def test_an_old_client_gets_no_chunks(keep_alive: str) -> None:
    """HTTP/1.0 has no chunked encoding: `ab` and some proxies would read its sizes as the
    answer's text.
    """
    port, behind = free_port(), Behind("a stream")
    behind.go_on.set()
    async with opened(behind, port):
        for path, body in (("/slow", b"a stream has ended"), ("/", b"a stream")):
            head, _, sent = (await exchange(port, f"GET {path} HTTP/1.0\r\n{keep_alive}\r\n")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert b"transfer-encoding" not in head
            assert b"connection: close" in head
            assert sent == body
        head, _, sent = (await exchange(port, "HEAD / HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert (b"content-length: 8" in head, sent) == (True, b"")
        new = await exchange(port, "GET /slow HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert b"transfer-encoding: chunked" in new


@pytest.mark.parametrize("protocol", ["h2c", "websocket", "TLS/1.2"])
@pytest.mark.parametrize("apart", [False, True], ids=["in one piece", "in two pieces"])
@pytest.mark.parametrize(
    ("framing", "body", "length"),
    [
        (b"Content-Length: 3\r\n\r\n", b"abc", b"3"),
        (b"Transfer-Encoding: chunked\r\n\r\n", b"4\r\nabcd\r\n0\r\n\r\n", b"4"),
        (b"\r\n", b"", b"0"),
    ],
    ids=["length", "chunks", "no body"],
)
async def test_an_upgrade_is_ignored(protocol: str, apart: bool, framing: bytes, body: bytes, length: bytes) -> None:
    """The request keeps its body, and the connection speaks HTTP/1.1 as before.

    Java's default client offers h2c with each request to a port without TLS.
    """
    port = free_port()
    offer = f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {protocol}\r\nHTTP2-Settings: AAEA\r\n".encode()
    async with opened(Behind("one"), port), asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(HOST, port)
        for end in (b"", b"Connection: close\r\n"):
            head = b"POST /length HTTP/1.1\r\n" + end + offer + framing
            for piece in [head, body] if apart else [head + body]:
                writer.write(piece)
                await asyncio.sleep(0.01)
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
            assert await reader.readexactly(1) == length
        assert await reader.read() == b""
        writer.close()


async def test_pipelined_upgrades_are_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new parser for each would take time that is quadratic in their number."""
    made: list[object] = []
    parser = httptools.HttpRequestParser

    def count(protocol: object) -> object:
        made.append(protocol)
        return parser(protocol)

    monkeypatch.setattr(uvicorn_protocol.httptools, "HttpRequestParser", count)
    request = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    port = free_port()
    async with opened(Behind("one"), port):
        assert b"HTTP/1.1 200" in (await said_until_closed(port, [50 * request]))[0]
    assert len(made) <= 5  # without the limit, one for each request


@pytest.mark.parametrize("body", [0, 10, 1_000_000])
async def test_a_client_that_leaves_after_a_pipelined_request(body: int) -> None:
    """The server cancels the running request and does not read the next one."""
    port, behind = free_port(), Behind("a stream")
    async with opened(behind, port):
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"GET /slow HTTP/1.1\r\nHost: tandem\r\n\r\n")
        writer.write(b"POST /length HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % body + b"a" * body)
        await writer.drain()
        try:
            async with asyncio.timeout(WAIT_S):
                await reader.readuntil(b"a stream")
                writer.close()
                await behind.left.wait()
        finally:
            behind.go_on.set()


OTHERS = [b"SSH-2.0-none\r\n", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""]


@pytest.mark.parametrize("says", [None, *OTHERS], ids=["another service", "SSH", "404", "nothing"])
async def test_a_port_in_use(says: bytes | None) -> None:
    """A service refuses to share the port, although the kernel would allow it."""

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says or b"")
        await writer.drain()
        writer.close()

    port = free_port()
    other: Any = opened(Behind("one"), port, "another") if says is None else asyncio.start_server(talk, HOST, port)
    async with other if says is None else await other:
        with pytest.raises(PortTakenError, match=f"http_port: {HOST}:{port} is in use by another program"):
            await HttpServer(Behind("two").app, HOST, port, LEAVE_S, "ours").open()


@pytest.mark.usefixtures("tries_long")
async def test_routers_that_start_together() -> None:
    """Routers that check the port by binding it for a moment do not disturb each other."""
    port = free_port()
    servers = [HttpServer(Behind(str(number)).app, HOST, port, LEAVE_S, "ours") for number in range(6)]
    await asyncio.gather(*(server.open() for server in servers))
    assert await answers(port, 120) == {str(number) for number in range(6)}
    await asyncio.gather(*(server.close() for server in servers))


async def test_an_address_of_another_machine() -> None:
    with pytest.raises(ConfigurationError, match=r"192.0.2.77:80.*cannot be used"):
        await HttpServer(Behind("one").app, "192.0.2.77", 80, LEAVE_S, "ours").open()


async def test_it_listens_where_it_is_told() -> None:
    port = free_port()
    async with opened(Behind("one"), port):
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", port)) != 0


async def test_a_disconnect_after_a_large_body_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uvicorn stops reading from the socket after more unread bytes than its limit."""
    monkeypatch.setattr(httptools_impl, "HIGH_WATER_LIMIT", 1000)
    begun, read, left = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, _: Send) -> None:
        begun.set()
        while (await receive()).get("more_body"):
            pass
        read.set()
        await scope[CONNECTION].disconnected
        left.set()

    port = free_port()
    server = HttpServer(app, HOST, port, LEAVE_S, "ours")
    await server.open()
    try:
        _, writer = await asyncio.open_connection(HOST, port)
        writer.write(b"POST / HTTP/1.1\r\nHost: tandem\r\nContent-Length: 5000\r\n\r\n")
        await begun.wait()
        writer.write(bytes(5000))
        await asyncio.wait_for(read.wait(), WAIT_S)
        writer.close()
        await asyncio.wait_for(left.wait(), 5)
    finally:
        await server.close()
