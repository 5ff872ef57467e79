"""An engine's door: where it takes calls from routers, apart from Serve.

A call is one request, its answer a stream of items (`messages.py`). A connection that is closed is a call that is over,
so a router that dies leaves nothing behind here. Who may call knows the door's key, which is drawn anew for each engine
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
from actors.rpc.address import Address, kept_alive
from actors.rpc.messages import Failure, Order
from actors.rpc.server_connection import Caller

logger = logging.getLogger(__name__)

UNREAD_S = 120.0
"""How long a router may take nothing of what is sent to it. Longer than it gives its clients (`http_server.py`): a
client that does not read must not look like an engine that has died."""

PATIENCE_S = 0.1
"""How long a call waits here for a place. A call's end, seen by its router, takes a moment to be one here."""

CUT_OFF_S = 1.0
"""How long calls that are cancelled at a door's end may take to end."""

REMEMBERED_S = 10.0
"""How long a router's queue is taken to be as it said."""

MOST_ROUTERS = 64
"""Routers whose queues are remembered."""


@dataclass(frozen=True, slots=True)
class DoorSnapshot:
    """Open `connections`, and the `routers` whose queues are remembered; a copy."""

    connections: int
    routers: frozenset[str]


class Door:
    """`open` it when the engine can serve; `close` it before the engine ends."""

    def __init__(self, serve: Callable[[Order], AsyncGenerator[Any, None]], places: int) -> None:
        """`serve` answers an order; of those there are at most `places` at a time."""
        self._serve = serve
        self._places = places
        self._key = secrets.token_hex()
        self._server: asyncio.Server | None = None
        self._callers: set[Caller] = set()
        self._leaving = False
        self._queued: dict[str, tuple[int, float]] = {}
        self._freed = asyncio.Event()
        self._nobody = asyncio.Event()
        self._nobody.set()
        self.ongoing = 0

    async def open(self, host: str, port: int) -> Address:
        """Listen on `host`, an address of this node; port 0 is any free one. OSError where that cannot be."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        kept_alive(listener, UNREAD_S)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: Caller(self._key, self._answer, self._callers), sock=listener)
        return Address(host, listener.getsockname()[1], self._key)

    def queued(self) -> int:
        """Requests that wait for an engine of this role, as the routers that call here have said lately."""
        oldest = time.monotonic() - REMEMBERED_S
        self._queued = {router: told for router, told in self._queued.items() if told[1] > oldest}
        return sum(queued for queued, _ in self._queued.values())

    def snapshot(self) -> DoorSnapshot:
        """Return who is connected and known now."""
        return DoorSnapshot(len(self._callers), frozenset(self._queued))

    async def drain(self) -> None:
        """Refuse what comes from now on, and wait for the calls that run."""
        self._leaving = True
        await self._nobody.wait()

    async def close(self) -> None:
        """Listen no more; calls that still run are cancelled."""
        self._leaving = True
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(caller.close(CUT_OFF_S) for caller in list(self._callers)))

    async def _answer(self, order: Order, caller: Caller) -> None:
        self._told(order, time.monotonic())
        if refusal := await self._refusal():
            await caller.send(refusal)
            return
        self.ongoing += 1
        self._nobody.clear()
        try:
            await self._serve_order(order, caller)
        finally:
            self.ongoing -= 1
            self._freed.set()
            if not self.ongoing:
                self._nobody.set()

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

    async def _serve_order(self, order: Order, caller: Caller) -> None:
        try:
            async with aclosing(self._serve(order)) as items:
                async for item in items:
                    await caller.send(item)
        except EngineDownError as error:
            await caller.send(Failure("engine_down", str(error)))
        except CannotResumeError as error:
            await caller.send(Failure("cannot_resume", str(error)))
        except Exception as error:
            logger.exception("a call failed")
            await caller.send(Failure("error", repr(error)))


def announced(address: Address, places_to_wait: int, **more: Any) -> dict[str, Any]:
    """What Serve tells routers of an engine: its door, and how many requests may wait in a router for one like it."""
    return {"door": asdict(address), "queue": places_to_wait, **more}
