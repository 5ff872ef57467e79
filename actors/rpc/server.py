"""An engine's RPC server, where routers send their calls without Serve.

Each router has one connection, which carries all its calls (`protocol.py`). A closed connection
ends its calls, so a router that dies leaves nothing behind. Routers authenticate with a key that is
drawn for each engine and reaches them through Serve's controller.
"""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from actors.errors import CannotResumeError, EngineDownError
from actors.rpc.address import RpcAddress, enable_keepalive
from actors.rpc.messages import RpcFailure, RpcRequest
from actors.rpc.server_connection import ServedStream, ServerConnection

logger = logging.getLogger(__name__)

UNREAD_S = 120.0
"""Timeout for a router that acknowledges nothing. Longer than the one for the router's clients
(`http_server.py`), so that a slow client does not look like a dead engine."""

SLOT_WAIT_S = 0.1
"""Wait for a slot before a call is refused. A router sees the end of a call shortly before the
engine does."""

CUT_OFF_S = 1.0
"""Timeout for cancelled calls to end when the server closes."""

REMEMBERED_S = 10.0
"""Time for which a router's reported queue length is believed."""

MOST_ROUTERS = 64
"""Number of routers whose queue lengths are kept."""


@dataclass(frozen=True, slots=True)
class RpcServerSnapshot:
    """Number of open connections, and ids of the routers with a known queue length."""

    connections: int
    routers: frozenset[str]


class RpcServer:
    """`open` it when the engine can serve; `close` it before the engine ends."""

    def __init__(
        self,
        serve: Callable[[RpcRequest], AsyncGenerator[Any, None]],
        slots: int,
        methods: Mapping[str, Callable[..., Awaitable[Any]]] | None = None,
    ) -> None:
        """Answer requests with `serve`, and calls of `methods` with theirs. Accept a request while
        fewer than `slots` sequences run."""
        self._serve = serve
        self._methods = methods or {}
        self._slots = slots
        self._key = secrets.token_hex()
        self._server: asyncio.Server | None = None
        self._connections: set[ServerConnection] = set()
        self._leaving = False
        self._queued: dict[str, tuple[int, float]] = {}
        self._freed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.ongoing = 0

    async def open(self, host: str, port: int) -> RpcAddress:
        """Listen on `host`, an address of this node; port 0 is any free port. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        enable_keepalive(listener, UNREAD_S)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ServerConnection(self._key, self._answer, self._call_method, self._connections), sock=listener
        )
        return RpcAddress(host, listener.getsockname()[1], self._key)

    def queued(self) -> int:
        """Return the number of requests that wait for engines of this role, as routers reported
        recently."""
        oldest = time.monotonic() - REMEMBERED_S
        self._queued = {router: told for router, told in self._queued.items() if told[1] > oldest}
        return sum(queued for queued, _ in self._queued.values())

    def snapshot(self) -> RpcServerSnapshot:
        """Return the connections and the known routers."""
        return RpcServerSnapshot(len(self._connections), frozenset(self._queued))

    async def drain(self) -> None:
        """Refuse new calls, and wait for the ones that run."""
        self._leaving = True
        await self._idle.wait()

    async def close(self) -> None:
        """Stop listening and cancel the calls that still run."""
        self._leaving = True
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(connection.close(CUT_OFF_S) for connection in list(self._connections)))

    async def _call_method(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return the encoded result of a method that routers may call. Needs no slot."""
        if method not in self._methods:
            raise ValueError(f"this engine has no method {method!r} for routers")
        result = await self._methods[method](*arguments)
        try:
            return msgspec.Raw(msgspec.msgpack.encode(result))
        except TypeError as error:  # later it would take other streams' messages with it
            raise ValueError(f"{method} returned what cannot be sent: {error}") from error

    async def _answer(self, request: RpcRequest, stream: ServedStream) -> RpcFailure | None:
        self._record_queue(request, time.monotonic())
        if refusal := await self._refusal():
            return refusal
        self.ongoing += request.call.sequences
        self._idle.clear()
        try:
            return await self._serve_call(request, stream)
        finally:
            self.ongoing -= request.call.sequences
            self._freed.set()
            if not self.ongoing:
                self._idle.set()

    def _record_queue(self, request: RpcRequest, now: float) -> None:
        """Store the queue length that a router reports with each call."""
        self._queued.pop(request.router, None)
        self._queued[request.router] = (request.queued, now)
        if len(self._queued) > MOST_ROUTERS:
            del self._queued[next(iter(self._queued))]  # the router that has been silent longest

    async def _refusal(self) -> RpcFailure | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOT_WAIT_S):
                while self.ongoing >= self._slots and not self._leaving:
                    self._freed.clear()
                    await self._freed.wait()
        if self._leaving:
            return RpcFailure("leaving", "this engine is stopping")
        if self.ongoing >= self._slots:
            return RpcFailure("full", f"this engine is serving {self.ongoing} sequences, which is its limit")
        return None

    async def _serve_call(self, request: RpcRequest, stream: ServedStream) -> RpcFailure | None:
        try:
            async with aclosing(self._serve(request)) as items:
                async for item in items:
                    await stream.send(item)
        except EngineDownError as error:
            return RpcFailure("engine_down", str(error))
        except CannotResumeError as error:
            return RpcFailure("cannot_resume", str(error))
        except Exception as error:
            logger.exception("a call failed")
            return RpcFailure("error", repr(error))
        return None


def replica_metadata(address: RpcAddress, queue: int, **more: Any) -> dict[str, Any]:
    """Return the metadata of a replica for routers: its RPC address, and the limit of their queues."""
    return {"rpc": asdict(address), "queue": queue, **more}
