"""An engine's door: the HTTP server of its own on which it takes calls from routers.

A call is one request, its answer a stream of items (`actors.wire`). A connection that is closed is a call that is over,
so a router that dies leaves nothing behind here. Who may call knows the door's key, which is drawn anew for each engine
and is told to routers by Serve's controller.
"""

import asyncio
import hmac
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from aiohttp import web

from actors.engine import EngineDownError
from actors.journal import CannotResumeError
from actors.wire import Failure, Order, WireError, pack, unpack_order

logger = logging.getLogger(__name__)

PATH = "/call"

KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host that has vanished is noticed after 30 s, where there is nothing to send to it."""

UNREAD_S = 120.0
"""How long a router may take nothing of what is sent to it. Longer than it gives its clients (`app.front`): a client
that does not read must not look like an engine that has died."""

PATIENCE_S = 0.1
"""How long a call waits here for a place. A call's end, seen by its router, takes a moment to be one here."""

IDLE_CONNECTION_S = 3600.0
"""Longer than a router keeps one: it must not send a call into a connection that is just being closed."""

CUT_OFF_S = 1.0
"""How long calls that are cancelled at a door's end may take to end."""

REMEMBERED_S = 10.0
"""How long a router's queue is taken to be as it said."""

MOST_ROUTERS = 64
"""Routers whose queues are remembered."""


@dataclass(frozen=True)
class Address:
    """Where a door is, and the key to it; its host as it is reached from other nodes."""

    host: str
    port: int
    key: str

    @property
    def url(self) -> str:
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}{PATH}"


def kept_alive(connection: socket.socket, unread_s: float | None = None) -> None:
    """Have the kernel notice when the other side is gone, and, with `unread_s`, end a connection whose other side takes
    nothing for so long. Connections inherit it from what they come in by."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = KEEPALIVE | ({"TCP_USER_TIMEOUT": int(unread_s * 1e3)} if unread_s else {})
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Door:
    """`open` it when the engine can serve; `close` it before the engine ends."""

    def __init__(self, serve: Callable[[Order], AsyncGenerator[Any, None]], places: int) -> None:
        """`serve` answers an order; of those there are at most `places` at a time."""
        self._serve = serve
        self._places = places
        self._key = secrets.token_hex()
        self._runner: web.AppRunner | None = None
        self._leaving = False
        self._queued: dict[str, tuple[int, float]] = {}
        self._freed = asyncio.Event()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self.ongoing = 0

    async def open(self, host: str, port: int) -> Address:
        """Listen on `host`, an address of this node; port 0 is any free one. OSError where that cannot be."""
        app = web.Application(client_max_size=0)  # routers have a limit of their own for bodies
        app.router.add_post(PATH, self._answer)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            keepalive_timeout=IDLE_CONNECTION_S,
            shutdown_timeout=CUT_OFF_S,
        )
        await self._runner.setup()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        kept_alive(listener, UNREAD_S)
        await web.SockSite(self._runner, listener).start()
        return Address(host, listener.getsockname()[1], self._key)

    def queued(self) -> int:
        """Requests that wait for an engine of this role, as the routers that call here have said lately."""
        oldest = time.monotonic() - REMEMBERED_S
        self._queued = {router: told for router, told in self._queued.items() if told[1] > oldest}
        return sum(queued for queued, _ in self._queued.values())

    async def drain(self) -> None:
        """Refuse what comes from now on, and wait for the calls that run."""
        self._leaving = True
        await self._nobody.wait()

    async def close(self) -> None:
        """Listen no more; calls that still run are cancelled."""
        self._leaving = True
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if not hmac.compare_digest(request.headers.get("Authorization", "").encode(), self._key.encode()):
            return web.Response(status=401, text="this door has another key")
        try:
            order = unpack_order(await request.read())
        except WireError as error:
            return web.Response(status=400, text=str(error))
        self._told(order, time.monotonic())
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        if refusal := await self._refusal():
            await response.prepare(request)
            await response.write(pack(refusal))
            return response
        self.ongoing += 1
        self._nobody.clear()
        try:
            await response.prepare(request)
            await self._serve_order(order, response)
        finally:
            self.ongoing -= 1
            self._freed.set()
            if not self.ongoing:
                self._nobody.set()
        return response

    def _told(self, order: Order, now: float) -> None:
        """Routers say with each call how many requests wait in them."""
        self._queued.pop(order.router, None)
        self._queued[order.router] = (order.queued, now)
        if len(self._queued) > MOST_ROUTERS:
            del self._queued[next(iter(self._queued))]  # that has been silent longest

    async def _refusal(self) -> Failure | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while self.ongoing >= self._places and not self._leaving:
                    self._freed.clear()
                    await self._freed.wait()
        if self._leaving:
            return Failure("leaving", "this engine is being stopped")
        if self.ongoing >= self._places:
            return Failure("full", f"this engine has {self.ongoing} requests, which is its limit")
        return None

    async def _serve_order(self, order: Order, response: web.StreamResponse) -> None:
        try:
            async with aclosing(self._serve(order)) as items:
                async for item in items:
                    await response.write(pack(item))
        except (ConnectionError, asyncio.CancelledError):
            raise  # the router has gone
        except EngineDownError as error:
            await response.write(pack(Failure("engine_down", str(error))))
        except CannotResumeError as error:
            await response.write(pack(Failure("cannot_resume", str(error))))
        except Exception as error:
            logger.exception("a call failed")
            await response.write(pack(Failure("error", repr(error))))


def announced(address: Address, places_to_wait: int, **more: Any) -> dict[str, Any]:
    """What Serve tells routers of an engine: its door, and how many requests may wait in a router for one like it."""
    return {"door": asdict(address), "queue": places_to_wait, **more}
