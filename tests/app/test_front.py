"""The router's own HTTP server: real sockets, and a small application behind them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import pairwise

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from app.front import SERVICE_PATH, Front, PortTakenError
from connectors.errors import ConfigurationError
from tests.e2e.service_process import free_port

HOST = "127.0.0.1"
LEAVE_S = 0.5


class Behind:
    """An application that answers with its name; `/slow` when it is told to."""

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

        self.app = Starlette(routes=[Route("/", named), Route("/slow", slow)])


@asynccontextmanager
async def opened(behind: Behind, port: int, service: str = "ours") -> AsyncGenerator[Front, None]:
    front = Front(behind.app, HOST, port, LEAVE_S, service)
    await front.open()
    try:
        yield front
    finally:
        await front.close()


async def answers(port: int, count: int) -> set[str]:
    """To as many requests, each over a connection of its own."""
    found = set()
    for _ in range(count):
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as client:
            found.add((await client.get("/")).text)
    return found


async def test_routers_of_one_service_share_their_port() -> None:
    """Both are asked; after one has closed, the other has it alone, and no request in between has failed."""
    port = free_port()
    async with opened(Behind("second"), port) as second, opened(Behind("first"), port):
        assert await answers(port, 60) == {"first", "second"}
        closing = asyncio.create_task(second.close())
        while not closing.done():
            assert await answers(port, 1) <= {"first", "second"}
        assert await answers(port, 20) == {"first"}


async def test_routers_are_replaced_under_load() -> None:
    """One after the other, five times: no request fails, whether its connection is new or kept from one before."""
    port, stop, count = free_port(), asyncio.Event(), 0

    async def client(kept: bool) -> None:
        nonlocal count
        async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as many:
            while not stop.is_set():
                if kept:
                    reply = await many.get("/")
                else:
                    async with httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as one:
                        reply = await one.get("/")
                assert reply.status_code == 200
                count += 1

    fronts = [Front(Behind(f"router {turn}").app, HOST, port, LEAVE_S, "ours") for turn in range(6)]
    await fronts[0].open()
    clients = [asyncio.create_task(client(kept)) for kept in (True, False, True, False)]
    for old, new in pairwise(fronts):
        await new.open()
        await old.close()
    stop.set()
    await asyncio.gather(*clients)
    await fronts[-1].close()
    assert count > 100


async def test_what_has_begun_is_answered() -> None:
    """A router that is stopped takes no more connections, and sends its streams to their end."""
    port, behind = free_port(), Behind("a stream")
    async with opened(behind, port) as front, httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as client:
        async with client.stream("GET", "/slow") as reply:
            pieces = reply.aiter_text()
            assert await anext(pieces) == "a stream"
            closing = asyncio.create_task(front.close())
            await asyncio.sleep(LEAVE_S + 0.5)
            assert not closing.done()
            with pytest.raises(httpx.ConnectError):
                await answers(port, 1)
            behind.go_on.set()
            assert await anext(pieces) == " has ended"
        await asyncio.wait_for(closing, 5)


async def test_a_client_that_leaves() -> None:
    """Its request is cancelled."""
    port, behind = free_port(), Behind("a stream")
    async with opened(behind, port):
        async with (
            httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as client,
            client.stream("GET", "/slow") as reply,
        ):
            await anext(reply.aiter_text())
        await asyncio.wait_for(behind.left.wait(), 5)


async def test_it_says_whose_it_is() -> None:
    """To whoever wants to share its port, and to load balancers whether it takes requests."""
    port = free_port()
    async with opened(Behind("one"), port) as front, httpx.AsyncClient(base_url=f"http://{HOST}:{port}") as client:
        reply = await client.get(SERVICE_PATH)
        assert (reply.status_code, reply.text) == (200, "ours")
        closing = asyncio.create_task(front.close())
        await asyncio.sleep(LEAVE_S / 5)
        reply = await client.get(SERVICE_PATH)
        assert (reply.status_code, reply.text) == (503, "ours"), "a load balancer is to send nobody here any more"
        await closing


async def test_the_port_of_another_service() -> None:
    """Is not shared, although the kernel would do it."""
    port = free_port()
    async with opened(Behind("one"), port, "another"):
        with pytest.raises(PortTakenError, match=f"http_port: {HOST}:{port}.*another program or service"):
            await Front(Behind("two").app, HOST, port, LEAVE_S, "ours").open()


@pytest.mark.parametrize("says", [b"SSH-2.0-none\r\n", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", b""])
async def test_the_port_of_another_program(says: bytes) -> None:
    """Whatever it says."""

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(talk, HOST, 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(PortTakenError, match=f"{HOST}:{port}"):
            await Front(Behind("two").app, HOST, port, LEAVE_S, "ours").open()


async def test_routers_that_start_together() -> None:
    """Each looks whether the port is free by taking it for a moment."""
    port = free_port()
    fronts = [Front(Behind(str(number)).app, HOST, port, LEAVE_S, "ours") for number in range(6)]
    await asyncio.gather(*(front.open() for front in fronts))
    assert await answers(port, 120) == {str(number) for number in range(6)}
    await asyncio.gather(*(front.close() for front in fronts))


async def test_an_address_of_another_machine() -> None:
    """Is refused by its name."""
    with pytest.raises(ConfigurationError, match=r"192.0.2.77:80.*cannot be listened on"):
        await Front(Behind("one").app, "192.0.2.77", 80, LEAVE_S, "ours").open()


async def test_it_listens_where_it_is_told() -> None:
    """And on no other interface."""
    port = free_port()
    async with opened(Behind("one"), port):
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", port)) != 0
