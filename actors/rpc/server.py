"""An engine's server: where it takes calls from routers, apart from Serve.

A call is one request, its answer a stream of items (`messages.py`). A connection that is closed is a call that is over,
so a router that dies leaves nothing behind here. A caller knows the server's key, which is drawn anew for each engine
and is told to routers by Serve's controller.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any

from actors.errors import CannotResumeError, EngineDownError
from actors.rpc.address import RpcAddress, enable_keepalive
from actors.rpc.messages import RpcFailure, RpcRequest
from actors.rpc.server_connection import ServerConnection

logger = logging.getLogger(__name__)

UNREAD_S = 120.0
"""How long a router may take nothing of what is sent to it. Longer than it gives its clients (`http_server.py`): a
client that does not read must not look like an engine that has died."""

PATIENCE_S = 0.1
"""How long a call waits here for a place. A call's end, seen by its router, takes a moment to be one here."""

CUT_OFF_S = 1.0
"""How long calls that are cancelled at a server's end may take to end."""

REMEMBERED_S = 10.0
"""How long a router's queue is taken to be as it said."""

MOST_ROUTERS = 64
"""Routers whose queues are remembered."""


@dataclass(frozen=True, slots=True)
class RpcServerSnapshot:
    """Open `connections`, and the `routers` whose queues are remembered; a copy."""

    connections: int
    routers: frozenset[str]


class RpcServer:
    """`open` it when the engine can serve; `close` it before the engine ends."""

    def __init__(self, serve: Callable[[RpcRequest], AsyncGenerator[Any, None]], slots: int) -> None:
        """`serve` answers a request; of those there are at most `slots` at a time."""
        self._serve = serve
        self._slots = slots
        self._key = secrets.token_hex()
        self._server: asyncio.Server | None = None
        self._connections: set[ServerConnection] = set()
        self._leaving = False
        self._queued: dict[str, tuple[int, float]] = {}
        self._freed = asyncio.Event()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self.ongoing = 0

    async def open(self, host: str, port: int) -> RpcAddress:
        """Listen on `host`, an address of this node; port 0 is any free one. OSError where that cannot be."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        enable_keepalive(listener, UNREAD_S)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ServerConnection(self._key, self._answer, self._connections), sock=listener
        )
        return RpcAddress(host, listener.getsockname()[1], self._key)

    def queued(self) -> int:
        """Requests that wait for an engine of this role, as the routers that call here have said lately."""
        oldest = time.monotonic() - REMEMBERED_S
        self._queued = {router: told for router, told in self._queued.items() if told[1] > oldest}
        return sum(queued for queued, _ in self._queued.values())

    def snapshot(self) -> RpcServerSnapshot:
        """Return who is connected and known now."""
        return RpcServerSnapshot(len(self._connections), frozenset(self._queued))

    async def drain(self) -> None:
        """Refuse what comes from now on, and wait for the calls that run."""
        self._leaving = True
        await self._nobody.wait()

    async def close(self) -> None:
        """Listen no more; calls that still run are cancelled."""
        self._leaving = True
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(connection.close(CUT_OFF_S) for connection in list(self._connections)))

    async def _answer(self, request: RpcRequest, connection: ServerConnection) -> None:
        self._told(request, time.monotonic())
        if refusal := await self._refusal():
            await connection.send(refusal)
            return
        self.ongoing += 1
        self._nobody.clear()
        try:
            await self._serve_order(request, connection)
        finally:
            self.ongoing -= 1
            self._freed.set()
            if not self.ongoing:
                self._nobody.set()

    def _told(self, request: RpcRequest, now: float) -> None:
        """Routers say with each call how many requests wait in them."""
        self._queued.pop(request.router, None)
        self._queued[request.router] = (request.queued, now)
        if len(self._queued) > MOST_ROUTERS:
            del self._queued[next(iter(self._queued))]  # that has been silent longest

    async def _refusal(self) -> RpcFailure | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while self.ongoing >= self._slots and not self._leaving:
                    self._freed.clear()
                    await self._freed.wait()
        if self._leaving:
            return RpcFailure("leaving", "this engine is being stopped")
        if self.ongoing >= self._slots:
            return RpcFailure("full", f"this engine has {self.ongoing} requests, which is its limit")
        return None

    async def _serve_order(self, request: RpcRequest, connection: ServerConnection) -> None:
        try:
            async with aclosing(self._serve(request)) as items:
                async for item in items:
                    await connection.send(item)
        except EngineDownError as error:
            await connection.send(RpcFailure("engine_down", str(error)))
        except CannotResumeError as error:
            await connection.send(RpcFailure("cannot_resume", str(error)))
        except Exception as error:
            logger.exception("a call failed")
            await connection.send(RpcFailure("error", repr(error)))


def replica_metadata(address: RpcAddress, places_to_wait: int, **more: Any) -> dict[str, Any]:
    """What Serve tells routers of an engine: its server, and how many requests may wait in a router for one like it."""
    return {"rpc": asdict(address), "queue": places_to_wait, **more}
