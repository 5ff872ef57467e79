"""Size and arrival time of request headers and bodies, and pipelined requests, on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable

import psutil
import pytest

from actors.rpc import address
from actors.upstream import uvicorn_protocol
from testing.ports import free_port
from tests.app.http.servers import HEAD, HOST, LARGE_BYTES, WAIT_S, Behind, answers, opened, said_until_closed

HEAD_S = 0.4
"""Header timeout of tests with the fixture `short_head`."""

SOON_S = 30.0
"""Time in seconds, far below the timeout of idle connections, far above a machine's pause."""


@pytest.fixture
def short_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "HEAD_S", HEAD_S)


@pytest.fixture
async def port() -> AsyncGenerator[int, None]:
    """The port of a server that answers "one"."""
    async with opened(Behind("one"), port := free_port()):
        yield port


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
async def test_what_has_no_end_is_not_kept(port: int, first: bytes, piece: bytes) -> None:
    """600 MB before a request or after its body are refused, and the router keeps none of them."""
    process = psutil.Process()
    before = process.memory_info().rss
    said, _ = await said_until_closed(port, endless(first, piece))
    assert said == b"" or said.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))
    assert process.memory_info().rss - before < 30e6
    assert await answers(port, 1) == {"one"}


UPGRADE = b"POST /length HTTP/1.1\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        *(
            (HEAD + b"Connection: close\r\nx: " + b"a" * length + b"\r\n\r\n", status)
            for length, status in ((60_000, 200), (70_000, 431), (250_000, 431))
        ),
        (b"POST /length HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nnot a length\r\n", 400),
        (UPGRADE + b"Transfer-Encoding: chunked\r\n\r\nno\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", 400),
        (b"CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n", 400),
    ],
    ids=["60 KB", "70 KB", "250 KB", "a bad chunk", "a bad chunk after an upgrade", "HTTP/2", "a tunnel"],
)
async def test_one_answer(port: int, request_bytes: bytes, status: int) -> None:
    said, _ = await said_until_closed(port, [request_bytes])
    assert said.startswith(b"HTTP/1.1 %d " % status)
    assert said.count(b"HTTP/1.1") == 1


@pytest.mark.usefixtures("short_head")
@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([b"GET / HT"], b"HTTP/1.1 408 "),
        ([HEAD], b"HTTP/1.1 408 "),
        ([HEAD, *[b"x: y\r\n"] * 50], b"HTTP/1.1 408 "),
        ([b"\r\n"] * 50, b""),
    ],
    ids=["half a line", "half a head", "a line at intervals", "empty lines at intervals"],
)
async def test_a_head_that_does_not_come(port: int, pieces: list[bytes], says: bytes) -> None:
    """The server waits for the header timeout, even if small pieces keep arriving."""
    left = iter(pieces)
    said, took_s = await said_until_closed(port, left, HEAD_S / 5)
    assert said.startswith(says)
    assert bool(said) == bool(says)
    assert took_s >= HEAD_S
    if len(pieces) > 1:
        assert next(left, None) is not None, "the header timeout expires long before the last piece"


REFUSED = b"POST /refuse HTTP/1.1\r\nContent-Length: 1000\r\n\r\n"


@pytest.mark.usefixtures("short_head")
@pytest.mark.parametrize(
    ("pieces", "pause", "statuses"),
    [
        # Bytes that stop uvicorn's keep-alive timer start the header timer.
        ([HEAD + b"\r\n", b"\r\n"], 1 / 2, [200]),
        ([HEAD + b"\r\n", HEAD], 1 / 2, [200, 408]),
        # The rest of the body is no other request.
        ([REFUSED, *[b"a"] * 100], 1 / 4, [403]),
    ],
    ids=["an empty line", "half a head", "the rest of a body"],
)
async def test_what_does_not_come_after_an_answer(
    port: int, pieces: list[bytes], pause: float, statuses: list[int]
) -> None:
    said, took_s = await said_until_closed(port, pieces, HEAD_S * pause)
    assert [int(one[:3]) for one in said.split(b"HTTP/1.1 ")[1:]] == statuses
    assert took_s < SOON_S


@pytest.mark.usefixtures("short_head")
async def test_between_requests_the_other_timer_counts(port: int) -> None:
    """An idle connection is kept for longer than the header timeout."""
    requests = [HEAD + b"\r\n", HEAD + b"\r\n", HEAD + b"Connection: close\r\n\r\n"]
    said, took_s = await said_until_closed(port, requests, 2 * HEAD_S)
    assert said.count(b"HTTP/1.1 200 ") == 3
    assert took_s >= 4 * HEAD_S


@pytest.mark.parametrize("unread_s", [WAIT_S, 0.1], ids=["within the limit", "beyond the limit"])
async def test_a_client_that_reads_nothing_for_a_while(unread_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has a limit of its own, other than that of connections to engines."""
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


@pytest.mark.usefixtures("short_head")
@pytest.mark.parametrize("pieces", [[HEAD + b"\r\n"], []], ids=["after a request", "before any"])
async def test_an_idle_connection_closes(pieces: list[bytes]) -> None:
    """The timeout is a setting of its own, also for a connection that a client opens in advance."""
    port = free_port()
    async with opened(Behind("one"), port, idle_s=3 * HEAD_S):
        said, took_s = await said_until_closed(port, pieces)
        assert said.count(b"HTTP/1.1 200 ") == len(pieces)
        assert took_s >= 3 * HEAD_S


@pytest.mark.usefixtures("short_head")
async def test_a_body_takes_longer_than_the_header_timeout(port: int) -> None:
    close = b"Connection: close\r\n\r\n"
    head = b"POST /length HTTP/1.1\r\nContent-Length: 8000000\r\n" + close
    said, took_s = await said_until_closed(port, [head, *[b"a" * 1_000_000] * 8], HEAD_S / 4)
    assert said.endswith(b"8000000")
    assert took_s > HEAD_S
    head = b"POST /length HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + close
    said, _ = await said_until_closed(port, [head + b"1\r\na\r\n" * 100_000 + b"0\r\nX: y\r\n\r\n"])
    assert said.endswith(b"100000")


async def test_requests_that_come_together(port: int) -> None:
    """The server answers the first pipelined request and closes the connection, so that clients
    repeat the others. Together the headers may be larger than the limit of one header.
    """
    many = (HEAD + b"x: " + b"a" * 5000 + b"\r\n\r\n") * 40
    said, _ = await said_until_closed(port, [many + HEAD + b"\r\n"])
    assert (said.count(b"HTTP/1.1 200 "), said.count(b"HTTP/1.1 "), said.count(b"connection: close")) == (1, 1, 1)
    assert said.endswith(b"one")


@pytest.mark.usefixtures("short_head")
@pytest.mark.parametrize("rest", [b"", b"x: " + b"a" * 70_000, b"bad\r\n\r\n"], ids=["late", "large", "malformed"])
async def test_headers_during_an_answer(rest: bytes) -> None:
    """The timeout of the next headers starts after the answer, which bad headers do not corrupt."""
    port, behind = free_port(), Behind("a stream")
    async with opened(behind, port):
        stream = b"GET /slow HTTP/1.1\r\nHost: tandem\r\n\r\n"
        asking = asyncio.create_task(said_until_closed(port, [stream, HEAD + rest], HEAD_S / 2))
        # Refused headers close the connection at once; late ones do not while an answer runs.
        await asyncio.wait({asking}, timeout=20 if rest else 3 * HEAD_S)
        assert asking.done() == bool(rest)
        behind.go_on.set()
        said, _ = await asking
        assert said.startswith(b"HTTP/1.1 200 ")
        assert b"a stream" in said
        assert (b" has ended" in said, b"HTTP/1.1 408 " in said) == (not rest, not rest)
        assert b"HTTP/1.1 4" not in said.replace(b"HTTP/1.1 408", b"")


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
