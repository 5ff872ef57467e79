"""An engine's RPC server: accepts calls from routers, without Ray Serve in between.

Each router has one connection for all its calls (`protocol.py`). A closed connection cancels its
calls, so a router that dies leaves no calls behind. Each server generates a key. Serve's controller
distributes the key to routers, which authenticate with it.
"""

import asyncio
import logging
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any

import msgspec

from actors.errors import CannotResumeError, EngineDownError
from actors.rpc.address import RpcAddress, enable_keepalive
from actors.rpc.messages import KEEP, RpcFailure, RpcRequest
from actors.rpc.protocol import NEWEST_VERSION
from actors.rpc.server_connection import ServedStream, ServerConnection

logger = logging.getLogger(__name__)

HANDSHAKE_S = 10.0
"""Timeout of a TLS handshake in seconds."""

SLOT_WAIT_S = 0.1
"""Time in seconds for which a call waits for a slot before the engine refuses it.

When a router cancels a call, it frees the slot shortly before the engine does.
"""

CUT_OFF_S = 1.0
"""Timeout in seconds for the end of cancelled calls when the server closes.

Routers then have the same time to read the EndStreams.
"""

REMEMBERED_S = 10.0
"""Maximum age in seconds of a queue length reported by a router."""

KEPT_WITHIN_S = 2.0
"""Minimum time in seconds for which a stopping engine accepts calls.

If Serve stops the routers at the same time, each of them sends KEEP within this time.
"""


HANDED_BACK = object()
"""Item that ends a call before any answer, so that another engine serves it."""


class RpcServer:
    """RPC server of one engine.

    Call `open` after the engine's start and `close` before the engine's end.
    """

    def __init__(
        self,
        serve: Callable[[RpcRequest, ServedStream], AsyncGenerator[Any, None]],
        slots: int,
        methods: Mapping[str, Callable[..., Awaitable[Any]]] | None = None,
    ) -> None:
        """Create the server.

        ``serve``    yields the items that answer a request on a stream
        ``slots``    number of ongoing sequences at which the server refuses requests
        ``methods``  methods available to routers, by name; they need no slot
        """
        self._serve = serve
        self._methods = {**(methods or {}), KEEP: self._keep}
        self._slots = slots
        self._key = secrets.token_hex()
        self._server: asyncio.Server | None = None
        self._connections: set[ServerConnection] = set()
        self.refuses = asyncio.Event()
        """Set while the server refuses new calls: it stops, or an operator drains the engine."""
        self._stops = False
        self._queued: dict[str, tuple[int, float]] = {}
        self._ended = asyncio.Event()
        """Set when a call or a KEEP has ended."""
        self._kept = 0
        self.ongoing = 0

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> RpcAddress:
        """Listen on `host`, an address of this node; return the server's address for routers.

        Port 0 selects a free port. Raises OSError if the address cannot be used.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        # A closed connection cancels the router's calls. Slow clients do not cause it: the router
        # always reads its connections, and credit limits what an engine sends.
        enable_keepalive(listener)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: ServerConnection(self._key, self._run_call, self._run_method, self._connections),
            sock=listener,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
        )
        return RpcAddress(host, listener.getsockname()[1], self._key)

    def queued(self) -> int:
        """Return the number of requests that wait in routers for engines of this role.

        Adds up the last `RpcRequest.queued` of each router that has sent a call in the last
        REMEMBERED_S seconds, and forgets the reports of the others.
        """
        oldest = time.monotonic() - REMEMBERED_S
        self._queued = {router: told for router, told in self._queued.items() if told[1] > oldest}
        return sum(queued for queued, _ in self._queued.values())

    async def drain(self) -> None:
        """Wait for stopping routers, then refuse new calls and wait for the end of running calls.

        Whatever stops all roles at once must stop routers first: they still receive requests.
        Methods still run.
        """
        await asyncio.sleep(KEPT_WITHIN_S)
        await self._until(lambda: not self._kept)
        self._stop()
        await self._until(lambda: not self.ongoing)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._ended.clear()
            await self._ended.wait()

    async def close(self) -> None:
        """Stop listening, cancel the running calls and methods, and close all connections."""
        self._stop()
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(connection.close(CUT_OFF_S) for connection in list(self._connections)))

    def _stop(self) -> None:
        self._stops = True
        self.refuse_calls(True)

    def refuse_calls(self, refuse: bool) -> None:
        """Refuse new calls, or accept them again; a stopping server accepts none."""
        if refuse:
            self.refuses.set()
        elif not self._stops:
            self.refuses.clear()

    async def _keep(self) -> None:
        """Keep a stopping engine for the calling router; return at once if it refuses new calls."""
        self._kept += 1
        try:
            if not self._stops:
                await asyncio.Event().wait()
        finally:
            self._kept -= 1
            self._ended.set()

    async def _run_method(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Return the encoded result of one of `methods`.

        Raises the method's errors, and ValueError for an unknown method or a result of a type
        that msgpack cannot encode.
        """
        if method not in self._methods:
            raise ValueError(f"this engine has no method {method!r} for routers")
        result = await self._methods[method](*arguments)
        try:
            return msgspec.Raw(msgspec.msgpack.encode(result))
        except TypeError as error:  # in `take`, the error would affect the messages of all streams
            raise ValueError(f"{method} returned a value that msgpack cannot encode: {error}") from error

    async def _run_call(self, request: RpcRequest, stream: ServedStream) -> RpcFailure | None:
        self._queued[request.router] = request.queued, time.monotonic()
        self.queued()  # forgets routers that have stopped
        if refusal := await self._refusal():
            return refusal
        self.ongoing += request.call.sequences
        try:
            return await self._serve_call(request, stream)
        finally:
            self.ongoing -= request.call.sequences
            self._ended.set()

    async def _refusal(self) -> RpcFailure | None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SLOT_WAIT_S):
                await self._until(lambda: self.ongoing < self._slots or self.refuses.is_set())
        if self.refuses.is_set():
            return self._refused()
        if self.ongoing >= self._slots:
            return RpcFailure("full", f"this engine is serving {self.ongoing} sequences; its limit is {self._slots}")
        return None

    def _refused(self) -> RpcFailure:
        # After `leaving`, routers never call the engine again; a drain can be undone.
        if self._stops:
            return RpcFailure("leaving", "this engine is stopping")
        return RpcFailure("full", "an operator drains this engine")

    async def _serve_call(self, request: RpcRequest, stream: ServedStream) -> RpcFailure | None:
        try:
            async with aclosing(self._serve(request, stream)) as items:
                async for item in items:
                    if item is HANDED_BACK:
                        # Before the engine aborts the request: decode computes the prompt when it
                        # learns that the transfer has failed.
                        stream.end(self._refused())
                        break
                    await stream.send(item)
        except EngineDownError as error:
            return RpcFailure("engine_down", str(error))
        except CannotResumeError as error:
            return RpcFailure("cannot_resume", str(error))
        except Exception as error:
            logger.exception(
                "%s %s failed in this engine; sending the error to the router", request.call.method, request.call.path
            )
            return RpcFailure("error", repr(error))
        return None


def replica_metadata(address: RpcAddress, queue: int, **more: Any) -> dict[str, Any]:
    """Return the metadata of a replica, or of one of its data-parallel ranks, for routers.

    ``address``  address of its RPC server
    ``queue``    number of requests that may wait in one router for engines of the role
    ``more``     further entries
    """
    return {"rpc": asdict(address), "version": NEWEST_VERSION, "queue": queue, **more}
