"""One router's connection at an engine's RPC server: requests are answered one after the other."""

import asyncio
import hmac
import logging
from collections.abc import Callable, Coroutine
from typing import Any, cast

from actors.request import Accepted, ResponseStart
from actors.rpc.messages import RpcCancel, RpcEnd, RpcFailure, RpcHello, RpcProtocolError, RpcRequest, Unpacker, pack

logger = logging.getLogger(__name__)

HELLO_S = 5.0
"""Timeout for a new connection to authenticate."""

HELLO_BYTES = 1024
"""Size limit before authentication. Later requests have none: routers limit the size of bodies."""

LINGER_S = 0.002
"""Delay of small items, to send them with the next one unless the router waits for them: each
message wakes it."""

Serve = Callable[[RpcRequest, "ServerConnection"], Coroutine[Any, Any, None]]
"""Answers a request by sending items on the connection; cancelled when the router no longer needs
the answer."""


class ServerConnection(asyncio.Protocol):
    """Made for each connection; closes it when the key is wrong or a message is invalid."""

    def __init__(self, key: str, serve: Serve, connections: set["ServerConnection"]) -> None:
        """Be in `connections` while connected."""
        self._key = key.encode()
        self._serve = serve
        self._connections = connections
        self._unpacker = Unpacker(HELLO_BYTES)
        self._authenticated = False
        self._requests = 0
        self._call: asyncio.Task[None] | None = None
        self._wanted = False
        self._expects_refusal = False
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._held = b""
        self._lingering: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the timeout for authentication; asyncio's hook."""
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._authentication_timer = asyncio.get_running_loop().call_later(
            HELLO_S, self._reject, "it did not authenticate in time"
        )

    def data_received(self, data: bytes) -> None:
        """Handle complete messages; asyncio's hook."""
        try:
            for message in self._unpacker.feed(data):
                self._handle(message)
        except RpcProtocolError as error:
            self._reject(str(error))

    def connection_lost(self, _: Exception | None) -> None:
        """Cancel the call; asyncio's hook."""
        self._authentication_timer.cancel()
        self._connections.discard(self)
        self._can_write.set()
        if self._lingering is not None:
            self._lingering.cancel()
        self._cancel_call()

    def pause_writing(self) -> None:
        """Stop sending: the router reads too slowly. Asyncio's hook."""
        self._can_write.clear()

    def resume_writing(self) -> None:
        """Send again; asyncio's hook."""
        self._can_write.set()

    async def send(self, item: Any) -> None:
        """Send the next item of the answer. Waits while earlier items are unread.

        `Accepted` and the start of the response are sent with the next item, or after LINGER_S.
        """
        if isinstance(item, Accepted | ResponseStart) and not self._expects_refusal:
            self._hold(item)
        else:
            self._write(item)
        if not self._can_write.is_set():
            await self._can_write.wait()

    async def close(self, within_s: float) -> None:
        """Close the connection and wait for its call to end."""
        self._transport.abort()
        self._cancel_call()
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

    def _handle(self, message: Any) -> None:
        match message:
            case RpcHello(key) if not self._authenticated:
                if not hmac.compare_digest(key.encode(), self._key):
                    raise RpcProtocolError("wrong key")
                self._authenticated = True
                self._authentication_timer.cancel()
                self._unpacker.most_bytes = None
            case RpcRequest() if self._authenticated and self._call is None:
                self._requests += 1
                self._wanted = True
                self._expects_refusal = message.maybe_full
                self._call = asyncio.create_task(self._serve(message, self), name="answers-a-call")
                self._call.add_done_callback(self._answered)
            case RpcCancel(number) if self._authenticated:
                if number == self._requests:
                    self._cancel_call()
            case _:
                raise RpcProtocolError(f"unexpected {type(message).__name__}")

    def _cancel_call(self) -> None:
        """Cancel the call once: a second cancellation would interrupt the abort in the engine."""
        if self._call is not None and self._wanted:
            self._wanted = False
            self._call.cancel()

    def _answered(self, call: asyncio.Task[None]) -> None:
        """Send the end of the answer, however the call ended; a cancelled call may never have
        started."""
        self._call = None
        if not call.cancelled() and (error := call.exception()) is not None:
            logger.error("a call failed", exc_info=error)
        self._write(RpcEnd())

    def _reject(self, why: str) -> None:
        logger.warning("closing a router's connection: %s", why)
        self._write(RpcFailure("stranger", why))
        self._transport.close()
