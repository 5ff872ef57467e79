"""The router's own HTTP server: real sockets, and a small application behind them."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from types import SimpleNamespace

import httpx
import psutil
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.rpc import address
from actors.upstream import uvicorn_protocol
from app.http import http_server
from app.http.http_server import SERVICE_PATH, HttpServer, PortTakenError
from app.http.parsing import read_request
from connectors.errors import ConfigurationError
from testing.ports import free_port

HOST = "127.0.0.1"
LEAVE_S = 0.5
WAIT_S = 60
"""Limit of a wait for an event that is certain: far above a pause of the machine."""

LARGE_BYTES = 2**25
"""Size of an answer that the buffers of a connection cannot hold."""

HEAD = b"GET / HTTP/1.1\r\nHost: tandem\r\n"
HEAD_S = 0.4
"""Header timeout of tests with the fixture `short_head`."""


@pytest.fixture(autouse=True)
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine does not end a router's question to the listener of its port."""
    monkeypatch.setattr(http_server, "ASK_S", WAIT_S)


@pytest.fixture
def tries_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pause of the machine is not the end of a router's attempts to share its port."""
    monkeypatch.setattr(http_server, "SETTLES_S", 12.0)


def http(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{HOST}:{port}", timeout=WAIT_S)


class Behind:
    """An application that answers with its name, and to `/slow` on demand."""

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
    behind: Behind, port: int, service: str = "ours", unread_s: float = WAIT_S
) -> AsyncGenerator[HttpServer, None]:
    server = HttpServer(behind.app, HOST, port, LEAVE_S, service, unread_s=unread_s)
    await server.open()
    try:
        yield server
    finally:
        await server.close()


async def answers(port: int, count: int) -> set[str]:
    """Send this number of requests, each on its own connection."""
    found = set()
    for _ in range(count):
        async with http(port) as client:
            found.add((await client.get("/")).text)
    return found


async def until_refused(port: int) -> None:
    """Send requests until nothing listens on the port."""
    async with asyncio.timeout(WAIT_S):
        with suppress(httpx.ConnectError):
            while True:
                await answers(port, 1)


@pytest.mark.usefixtures("tries_long")
async def test_routers_of_one_service_share_their_port() -> None:
    """Both routers get requests. After one has closed, the other gets all requests, and none fails
    meanwhile.
    """
    port = free_port()
    async with opened(Behind("second"), port) as second, opened(Behind("first"), port):
        assert await answers(port, 60) == {"first", "second"}
        closing = asyncio.create_task(second.close())
        while not closing.done():
            assert await answers(port, 1) <= {"first", "second"}
        assert await answers(port, 20) == {"first"}


@pytest.mark.usefixtures("tries_long")
async def test_routers_are_replaced_under_load() -> None:
    """One after the other, five times: no request fails, on new or reused connections."""
    port, stop, count = free_port(), asyncio.Event(), 0

    async def client(kept: bool) -> None:
        nonlocal count
        async with http(port) as many:
            while not stop.is_set():
                if kept:
                    reply = await many.get("/")
                else:
                    async with http(port) as one:
                        reply = await one.get("/")
                assert reply.status_code == 200
                count += 1

    servers = [HttpServer(Behind(f"router {turn}").app, HOST, port, LEAVE_S, "ours") for turn in range(6)]
    await servers[0].open()
    clients = [asyncio.create_task(client(kept)) for kept in (True, False, True, False)]
    for old, new in pairwise(servers):
        await new.open()
        await old.close()
    stop.set()
    await asyncio.gather(*clients)
    await servers[-1].close()
    assert count > 100


@pytest.mark.usefixtures("tries_long")
async def test_a_router_without_a_decode_engine_is_not_ready() -> None:
    """A router without engines reports 503 and still answers requests.

    During an upgrade through a second cluster, its routers start long before its engines. A load
    balancer that selects both clusters' routers must not send requests there.
    """
    port, ready = free_port(), False
    server = HttpServer(Behind("new").app, HOST, port, LEAVE_S, "ours", ready=lambda: ready)
    await server.open()
    try:
        async with http(port) as client:
            reply = await client.get(SERVICE_PATH)
            assert (reply.status_code, reply.text) == (503, "ours")
            assert (await client.get("/")).status_code == 200
            async with opened(Behind("its peer"), port):  # they share the port before they are ready
                ready = True
                assert (await client.get(SERVICE_PATH)).status_code == 200
    finally:
        await server.close()


async def exchange(port: int, request: str) -> bytes:
    """Return all bytes of the answer, until the server closes the connection."""
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


async def test_a_connection_becomes_no_websocket() -> None:
    """The application has no WebSockets; the limits on headers and keys are for HTTP."""
    port = free_port()
    upgrade = "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    async with opened(Behind("one"), port) as server:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(
            f"GET / HTTP/1.1\r\nHost: x\r\n{upgrade}Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n".encode()
        )
        assert (await asyncio.wait_for(reader.readline(), WAIT_S)).startswith(b"HTTP/1.1 200")
        writer.close()
        assert server


async def test_what_has_begun_is_answered() -> None:
    """A stopping router accepts no more connections, and completes its streams."""
    port, behind = free_port(), Behind("a stream")
    async with opened(behind, port) as server, http(port) as client:
        async with client.stream("GET", "/slow") as reply:
            pieces = reply.aiter_text()
            assert await anext(pieces) == "a stream"
            closing = asyncio.create_task(server.close())
            await until_refused(port)
            assert not closing.done()
            behind.go_on.set()
            assert await anext(pieces) == " has ended"
        await asyncio.wait_for(closing, WAIT_S)


async def test_a_client_that_leaves() -> None:
    """The server cancels the client's request."""
    port, behind = free_port(), Behind("a stream")
    async with opened(behind, port):
        async with (
            http(port) as client,
            client.stream("GET", "/slow") as reply,
        ):
            await anext(reply.aiter_text())
        await asyncio.wait_for(behind.left.wait(), WAIT_S)


@pytest.mark.parametrize("rest", [b"no HTTP at all\r\n\r\n", HEAD + b"x: " + b"a" * 70_000 + b"\r\n\r\n"])
async def test_what_follows_a_pipelined_request_does_not_end_the_answer(rest: bytes) -> None:
    port, behind = free_port(), Behind("a stream")
    async with opened(behind, port):
        stream = b"GET /slow HTTP/1.1\r\nHost: tandem\r\n\r\n"
        asking = asyncio.create_task(said_until_closed(port, [stream + HEAD + b"\r\n" + rest, rest]))
        await asyncio.sleep(HEAD_S)
        behind.go_on.set()
        said, _ = await asking
        assert b" has ended" in said
        assert said.count(b"HTTP/1.1 ") == 1


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


async def test_it_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server answers with the service id for routers, and its readiness for load balancers."""
    port = free_port()
    async with opened(Behind("one"), port) as server, http(port) as client:
        reply = await client.get(SERVICE_PATH)
        assert (reply.status_code, reply.text) == (200, "ours")
        may_close = asyncio.Event()
        with monkeypatch.context() as leaving:  # for as long as `leave_s` lasts
            leaving.setattr(http_server, "asyncio", SimpleNamespace(sleep=lambda _: may_close.wait()))
            closing = asyncio.create_task(server.close())
            await asyncio.sleep(0)
        reply = await client.get(SERVICE_PATH)
        assert (reply.status_code, reply.text) == (503, "ours"), "a load balancer must send no more requests here"
        may_close.set()
        await closing


async def test_the_port_of_another_service() -> None:
    """A service refuses to share the port, although the kernel would allow it."""
    port = free_port()
    async with opened(Behind("one"), port, "another"):
        with pytest.raises(PortTakenError, match=f"http_port: {HOST}:{port}.*another program or service"):
            await HttpServer(Behind("two").app, HOST, port, LEAVE_S, "ours").open()


@pytest.mark.parametrize("says", [b"SSH-2.0-none\r\n", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""])
async def test_the_port_of_another_program(says: bytes) -> None:
    """The port is refused whatever the other program answers."""

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(talk, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PortTakenError, match=f"{HOST}:{port}"):
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
    """The server refuses the address by name."""
    with pytest.raises(ConfigurationError, match=r"192.0.2.77:80.*cannot be used"):
        await HttpServer(Behind("one").app, "192.0.2.77", 80, LEAVE_S, "ours").open()


async def test_it_listens_where_it_is_told() -> None:
    """The server listens on no other interface."""
    port = free_port()
    async with opened(Behind("one"), port):
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", port)) != 0


SOON_S = 30.0
"""Time far below the timeout of an idle connection, and far above a pause of the machine."""


@pytest.fixture
def short_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "HEAD_S", HEAD_S)


async def said_until_closed(port: int, pieces: Iterable[bytes], pause_s: float = 0.0) -> tuple[bytes, float]:
    """Return the answer to `pieces` until the connection closes, and the time until then."""
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
        pass  # the server closed it during a send
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        writer.close()
    return said, time.monotonic() - began_at


def endless(first: bytes, piece: bytes, count: int = 10_000) -> Iterable[bytes]:
    yield first
    for _ in range(count):
        yield piece


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (HEAD, b"x: " + b"a" * 60_000 + b"\r\n"),
        (HEAD + b"x: ", b"a" * 60_000),
        (b"GET /", b"a" * 60_000),
        (b"", b"\r\n" * 30_000),
        (HEAD, b"a: b\r\n" * 10_000),
        (b"POST /length HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"x: " + b"a" * 60_000 + b"\r\n"),
        (b"POST /length HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;", b"a" * 60_000),
    ],
    ids=["lines", "one line", "path", "empty lines", "short lines", "trailers", "chunk extension"],
)
async def test_what_has_no_end_is_not_kept(first: bytes, piece: bytes) -> None:
    """600 MB before a request or after its body are refused, and the router keeps none of them."""
    port, process = free_port(), psutil.Process()
    async with opened(Behind("one"), port):
        before = process.memory_info().rss
        said, _ = await said_until_closed(port, endless(first, piece))
        assert said == b"" or said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
        assert process.memory_info().rss - before < 30e6
        assert await answers(port, 1) == {"one"}


@pytest.mark.parametrize(("length", "status"), [(60_000, 200), (70_000, 431), (250_000, 431)])
async def test_a_large_head(length: int, status: int) -> None:
    """The request header arrives complete, in one piece."""
    port = free_port()
    async with opened(Behind("one"), port):
        head = HEAD + b"Connection: close\r\nx: " + b"a" * length + b"\r\n\r\n"
        said, _ = await said_until_closed(port, [head])
        assert said.startswith(b"HTTP/1.1 %d " % status)
        assert said.count(b"HTTP/1.1") == 1


@pytest.mark.usefixtures("short_head")
@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([b"GET / HT"], b"HTTP/1.1 408 "),
        ([HEAD], b"HTTP/1.1 408 "),
        ([HEAD, *[b"x: y\r\n"] * 50], b"HTTP/1.1 408 "),
        ([], b""),
        ([b"\r\n"] * 50, b""),
    ],
    ids=["half a line", "half a head", "a line now and then", "nothing", "empty lines now and then"],
)
async def test_a_head_that_does_not_come(pieces: list[bytes], says: bytes) -> None:
    """The server waits this long, whatever small pieces arrive meanwhile."""
    port = free_port()
    async with opened(Behind("one"), port):
        left = iter(pieces)
        said, took_s = await said_until_closed(port, left, HEAD_S / 5)
        assert said.startswith(says)
        assert bool(said) == bool(says)
        assert took_s >= HEAD_S
        if len(pieces) > 1:
            assert next(left, None) is not None, "the header timeout expires long before the last piece"


@pytest.mark.usefixtures("short_head")
@pytest.mark.parametrize("drip", [b"\r\n", HEAD], ids=["an empty line", "half a head"])
async def test_a_head_that_does_not_come_after_an_answer(drip: bytes) -> None:
    """Bytes that stop uvicorn's keep-alive timer start the header timer."""
    port = free_port()
    async with opened(Behind("one"), port):
        said, took_s = await said_until_closed(port, [HEAD + b"\r\n", drip], HEAD_S / 2)
        assert said.startswith(b"HTTP/1.1 200 ")
        assert said.count(b"HTTP/1.1 408 ") == (drip == HEAD)
        assert took_s < SOON_S


@pytest.mark.usefixtures("short_head")
async def test_a_body_that_does_not_come_after_its_answer() -> None:
    """The server does not parse the rest of the body as another request."""
    port = free_port()
    async with opened(Behind("one"), port):
        head = b"POST /refuse HTTP/1.1\r\nContent-Length: 1000\r\n\r\n"
        said, took_s = await said_until_closed(port, [head, *[b"a"] * 100], HEAD_S / 4)
        assert said.startswith(b"HTTP/1.1 403 ")
        assert said.count(b"HTTP/1.1") == 1
        assert took_s < SOON_S


@pytest.mark.usefixtures("short_head")
async def test_between_requests_the_other_timer_counts() -> None:
    """An idle connection is kept for longer than the header timeout."""
    port = free_port()
    async with opened(Behind("one"), port):
        requests = [HEAD + b"\r\n", HEAD + b"\r\n", HEAD + b"Connection: close\r\n\r\n"]
        said, took_s = await said_until_closed(port, requests, 2 * HEAD_S)
        assert said.count(b"HTTP/1.1 200 ") == 3
        assert took_s >= 4 * HEAD_S


@pytest.mark.parametrize("unread_s", [WAIT_S, 0.1], ids=["it may", "for too long"])
async def test_a_client_that_reads_nothing_for_a_while(unread_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is the server's own, not that of connections to engines."""
    monkeypatch.setattr(address, "KEEPALIVE", address.KEEPALIVE | {"TCP_USER_TIMEOUT": 100})
    behind = Behind("a")
    async with opened(behind, port := free_port(), unread_s=unread_s):
        reader, writer = await asyncio.open_connection(HOST, port, limit=2**16)
        writer.write(HEAD.replace(b"/ ", b"/large ") + b"Connection: close\r\n\r\n")
        if unread_s < WAIT_S:
            await asyncio.wait_for(behind.left.wait(), WAIT_S)
        else:
            await asyncio.sleep(2)
            assert len(await asyncio.wait_for(reader.read(-1), WAIT_S)) > LARGE_BYTES
        writer.close()


async def test_an_idle_connection_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "KEEP_ALIVE_S", HEAD_S)
    port = free_port()
    async with opened(Behind("one"), port):
        said, took_s = await said_until_closed(port, [HEAD + b"\r\n"])
        assert said.count(b"HTTP/1.1 200 ") == 1
        assert took_s >= HEAD_S


async def test_headers_in_single_bytes() -> None:
    """Headers that arrive byte by byte within the header timeout are accepted."""
    port = free_port()
    async with opened(Behind("one"), port):
        slow = HEAD + b"Connection: close\r\n\r\n"
        said, _ = await said_until_closed(port, [slow[i : i + 1] for i in range(len(slow))], 0.002)
        assert said.startswith(b"HTTP/1.1 200 ")


@pytest.mark.usefixtures("short_head")
async def test_a_body_takes_longer_than_the_header_timeout() -> None:
    """A large body that arrives slowly, and one in many chunks."""
    port = free_port()
    async with opened(Behind("one"), port):
        close = b"Connection: close\r\n\r\n"
        head = b"POST /length HTTP/1.1\r\nContent-Length: 8000000\r\n" + close
        said, took_s = await said_until_closed(port, [head, *[b"a" * 1_000_000] * 8], HEAD_S / 4)
        assert said.endswith(b"8000000")
        assert took_s > HEAD_S
        head = b"POST /length HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + close
        said, _ = await said_until_closed(port, [head + b"1\r\na\r\n" * 100_000 + b"0\r\nX: y\r\n\r\n"])
        assert said.endswith(b"100000")


@pytest.mark.usefixtures("short_head")
async def test_requests_that_come_together() -> None:
    """The first of pipelined requests is answered, and the connection closes: clients repeat the
    others. Together they may be larger than the limit of one header.
    """
    port = free_port()
    async with opened(Behind("one"), port):
        many = (HEAD + b"x: " + b"a" * 5000 + b"\r\n\r\n") * 40
        said, _ = await said_until_closed(port, [many + HEAD + b"\r\n"])
        assert (said.count(b"HTTP/1.1 "), said.count(b"connection: close")) == (1, 1)
        assert said.startswith(b"HTTP/1.1 200 ")
        assert said.endswith(b"one")


@pytest.mark.usefixtures("short_head")
@pytest.mark.parametrize("rest", [b"", b"x: " + b"a" * 70_000, b"bad\r\n\r\n"], ids=["late", "large", "malformed"])
async def test_headers_during_an_answer(rest: bytes) -> None:
    """The timeout of the next headers starts after the answer, which bad headers do not corrupt."""
    port, behind = free_port(), Behind("a stream")
    async with opened(behind, port):
        stream = b"GET /slow HTTP/1.1\r\nHost: tandem\r\n\r\n"
        asking = asyncio.create_task(said_until_closed(port, [stream, HEAD + rest], HEAD_S / 2))
        # A refused request ends the connection at once, a complete one with its answer.
        await asyncio.wait({asking}, timeout=20 if rest else 3 * HEAD_S)
        assert asking.done() == bool(rest)
        behind.go_on.set()
        said, _ = await asking
        assert said.startswith(b"HTTP/1.1 200 ")
        assert b"a stream" in said
        assert (b" has ended" in said, b"HTTP/1.1 408 " in said) == (not rest, not rest)
        assert b"HTTP/1.1 4" not in said.replace(b"HTTP/1.1 408", b"")


async def test_a_body_that_cannot_be_read() -> None:
    """The client receives an answer."""
    port = free_port()
    async with opened(Behind("one"), port):
        head = b"POST /length HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
        said, _ = await said_until_closed(port, [head + b"not a length\r\n"])
        assert said.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("given", ["0af76519-16cd-43dd-8448-eb211c80319c", "trace-1", None])
async def test_a_client_that_sends_an_id_in_the_header_and_in_the_body(given: str | None) -> None:
    """The header precedes the body, as in vLLM's `_base_request_id`, also if it is a UUID."""

    async def named(asked: Request) -> Response:
        read = await read_request(asked, "/v1/completions", max_body_bytes=100)
        return JSONResponse(dict(read.headers).get(b"x-request-id", b"").decode())

    port = free_port()
    app = Starlette(routes=[Route("/", named, methods=["POST"])])
    server = HttpServer(app, HOST, port, LEAVE_S, "ours")
    await server.open()
    try:
        async with httpx.AsyncClient(timeout=WAIT_S) as client:
            headers = {"x-request-id": given} if given else {}
            reply = await client.post(f"http://{HOST}:{port}/", json={"request_id": "mine"}, headers=headers)
    finally:
        await server.close()
    assert reply.json() == (given or "")
