"""A request through an ASGI application without a socket, and the effect of a disconnect."""

import asyncio
from contextlib import aclosing

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from actors.engine.asgi_call import call_asgi
from actors.request import Call

pytestmark = pytest.mark.usefixtures("virtual_time")


class Application:
    """ASGI application that streams pieces, fails, or waits; records how streams and waits end."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.asgi = Starlette(
            routes=[
                Route("/stream", self.stream),
                Route("/fail", self.fail),
                Route("/stubborn", self.stubborn),
            ]
        )

    async def stream(self, request: Request) -> StreamingResponse:
        async def pieces():
            try:
                for index in range(1000):
                    yield f"{index};"
                    await asyncio.sleep(0.01)
                self.ended.append("whole")
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise

        return StreamingResponse(pieces())

    async def fail(self, request: Request) -> None:
        raise RuntimeError("broken")

    async def stubborn(self, request: Request) -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            self.ended.append("stubborn")


@pytest.fixture
def application() -> Application:
    return Application()


async def test_pieces_come_as_they_are_made(application):
    """The first piece does not wait for the last; accumulated pieces arrive as one."""
    async with aclosing(call_asgi(application.asgi, Call("GET", "/stream"))) as answer:
        await anext(answer)
        assert await anext(answer) == b"0;"
        await asyncio.sleep(0.1)
        piled = await anext(answer)
    assert isinstance(piled, bytes)
    assert piled.startswith(b"1;2;3;")


async def test_closing_early_is_a_disconnect(application):
    """The application ends its stream before `aclose` returns."""
    answer = call_asgi(application.asgi, Call("GET", "/stream"))
    await anext(answer)
    await anext(answer)
    await answer.aclose()
    assert application.ended == ["cancelled"]


async def test_cancelling_the_reader_is_a_disconnect(application):
    """Serve cancels the reader in this way when a caller disconnects before an answer."""

    async def read() -> None:
        async with aclosing(call_asgi(application.asgi, Call("GET", "/stubborn"), disconnect_s=0.05)) as answer:
            await anext(answer)

    reader = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    reader.cancel()
    await asyncio.wait({reader}, timeout=5)
    assert reader.cancelled()
    assert application.ended == ["stubborn"], "an application that ignores the disconnect is cancelled"


async def test_an_applications_exception_reaches_the_reader(application):
    """The exception arrives after the 500 that Starlette makes of it."""
    with pytest.raises(RuntimeError, match="broken"):
        _ = [item async for item in call_asgi(application.asgi, Call("GET", "/fail"))]
