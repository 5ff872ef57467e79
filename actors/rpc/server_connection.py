"""A router's connection, at an engine's server: one request after the other, each answered to its end."""

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine
from typing import Any, cast

from actors.request import Accepted, ResponseStart
from actors.rpc.messages import RpcCancel, RpcEnd, RpcFailure, RpcHello, RpcProtocolError, RpcRequest, Unpacker, pack

logger = logging.getLogger(__name__)

HELLO_S = 5.0
"""How long who connects may take to say who it is."""

HELLO_BYTES = 1024
"""What it may send until then; a request may be of any size: routers have a limit of their own for bodies."""

LINGER_S = 0.002
"""How long small news wait for what follows, to be sent with it, unless the router waits for them: each wakes it."""

Serve = Callable[[RpcRequest, "ServerConnection"], Coroutine[Any, Any, None]]
"""Answers a request by what it sends to the connection; cancelled when nobody wants the answer any more."""


class ServerConnection(asyncio.Protocol):
    """Made for each connection. Who does not know `key`, or says what no router would, is let go."""

    def __init__(self, key: str, serve: Serve, connections: set["ServerConnection"]) -> None:
        """It is in `connections` while it is connected."""
        self._key = key.encode()
        self._serve = serve
        self._connections = connections
        self._unpacker = Unpacker(HELLO_BYTES)
        self._known = False
        self._requests = 0
        self._call: asyncio.Task[None] | None = None
        self._wanted = False
        self._doubtful = False
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._held = b""
        self._lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Asyncio's hook."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._patience = asyncio.get_running_loop().call_later(HELLO_S, self._send_away, "it has said nothing")

    def data_received(self, data: bytes) -> None:
        """Asyncio's hook."""
        try:
            for said in self._unpacker.feed(data):
                self._hear(said)
        except RpcProtocolError as error:
            self._send_away(str(error))

    def connection_lost(self, _: Exception | None) -> None:
        """Asyncio's hook: who is gone wants no answer."""
        self._patience.cancel()
        self._connections.discard(self)
        self._can_write.set()
        if self._lingering is not None:
            self._lingering.cancel()
        self._give_up()

    def pause_writing(self) -> None:
        """Asyncio's hook: the router does not read as fast as it is answered."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Asyncio's hook."""
        self._can_write.set()

    async def send(self, item: Any) -> None:
        """The next item of the answer. Waits while what was sent before is not taken.

        That the call is here, and how its response begins, goes with what comes next, or LINGER_S later.
        """
        if isinstance(item, Accepted | ResponseStart) and not self._doubtful:
            self._hold(item)
        else:
            self._write(item)
        if not self._can_write.is_set():
            await self._can_write.wait()

    async def close(self, within_s: float) -> None:
        """Let it go, and what is being answered end."""
        self._transport.abort()
        self._give_up()
        if self._call is not None:
            await asyncio.wait({self._call}, timeout=within_s)

    def _hold(self, item: Any) -> None:
        self._held += pack(item)
        if self._lingering is None:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._flush)

    def _write(self, item: Any) -> None:
        self._held += pack(item)
        self._flush()

    def _flush(self) -> None:
        held, self._held = self._held, b""
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if not self._transport.is_closing():  # else the call is about to be cancelled
            self._transport.write(held)

    def _hear(self, said: Any) -> None:
        match said:
            case RpcHello(key) if not self._known:
                if not hmac.compare_digest(key.encode(), self._key):
                    raise RpcProtocolError("this server has another key")
                self._known = True
                self._patience.cancel()
                self._unpacker.most_bytes = None
            case RpcRequest() if self._known and self._call is None:
                self._requests += 1
                self._wanted = True
                self._doubtful = said.maybe_full
                self._call = asyncio.create_task(self._serve(said, self), name="answers-a-call")
                self._call.add_done_callback(self._answered)
            case RpcCancel(number) if self._known:
                if number == self._requests:
                    self._give_up()
            case _:
                raise RpcProtocolError(f"no router says {type(said).__name__} here")

    def _give_up(self) -> None:
        """Once: what ends a call in its engine takes time, and is not to be cut off itself."""
        if self._call is not None and self._wanted:
            self._wanted = False
            self._call.cancel()

    def _answered(self, call: asyncio.Task[None]) -> None:
        """However it ended; a call that was cancelled may never have begun."""
        self._call = None
        if not call.cancelled() and (error := call.exception()) is not None:
            logger.error("a call failed", exc_info=error)
        self._write(RpcEnd())

    def _send_away(self, why: str) -> None:
        logger.warning("a connection is sent away: %s", why)
        self._write(RpcFailure("stranger", why))
        self._transport.close()
