"""A caller's connections to engines: sockets and timers around `protocol.py`.

The caller is a router, or a decode engine that calls prefill.
"""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

from actors.errors import EngineDownError, EngineError
from actors.request import Item
from actors.rpc.address import RpcAddress, enable_keepalive
from actors.rpc.messages import Reply, RpcFailure, RpcProtocolError, RpcRequest, StreamItem
from actors.rpc.protocol import CallerProtocol
from actors.tls import ReloadedTls

CONNECT_S = 5.0
"""Timeout of a TCP connect with its TLS handshake, in seconds; it normally takes milliseconds."""

IDLE_CONNECTION_S = 60.0
"""Time in seconds after which the router closes a connection without calls or methods."""


class Listener(Protocol):
    """Receiver of the items and the end of a call."""

    def received(self, item: Item) -> Callable[[], None] | None:
        """Receive the next item; return what to call after the items of its frame."""

    def ended(self, lost: str | None, failure: RpcFailure | None = None) -> None:
        """Receive the end of the call.

        ``lost``     why the connection ended before the call; None if the engine ended the call
        ``failure``  the engine's reason for a missing or incomplete answer; None without one
        """


class _Answer:
    def __init__(self) -> None:
        self.value: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def received(self, item: Any) -> None:
        if not self.value.done():
            self.value.set_result(item)

    def ended(self, lost: str | None, failure: RpcFailure | None = None) -> None:
        if not self.value.done():
            why = failure.message if failure else "the engine sent an EndStream without a result or reason"
            self.value.set_exception(EngineDownError(lost) if lost else EngineError(why))


class Channel(asyncio.Protocol):
    """Connection to one engine. Queues calls until the engine has answered the RpcHello."""

    def __init__(
        self, address: RpcAddress, closed: Callable[["Channel"], None], tls: ssl.SSLContext | None = None
    ) -> None:
        """Start to connect; call `closed` when the connection ends or cannot be opened.

        ``tls``  context of the connection; None: no TLS
        """
        self.address = address
        self._tls = tls
        self._closed = closed
        self._protocol = CallerProtocol(address.key)
        self._listeners: dict[int, Listener] = {}
        self._transport: asyncio.Transport | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._flushing: asyncio.Handle | None = None
        self._over = False
        self._connecting = asyncio.create_task(self._connect(), name=f"connects-to-{address.host}")

    @property
    def streams(self) -> int:
        """Number of calls and methods without an end from the engine.

        Includes those that the router cancelled after sending them.
        """
        return self._protocol.streams

    def call(self, request: RpcRequest, listener: Listener) -> int:
        stream = self._protocol.open(request)
        self._begin(stream, listener)
        return stream

    async def ask(self, method: str, *arguments: object) -> Any:
        """Return the result of a method of the engine.

        Raises EngineDownError if the connection cannot be opened or ends, EngineError if the method
        fails or the engine stops.
        """
        answer = _Answer()
        stream = self._protocol.ask(method, arguments)
        self._begin(stream, answer)
        try:
            return await answer.value
        finally:
            self.cancel(stream)

    def cancel(self, stream: int, done: bool = False) -> None:
        """Cancel a call or method; its listener receives nothing more.

        ``done``  whether decode has the KV that the call computed
        """
        if self._listeners.pop(stream, None) is not None:
            self._protocol.cancel(stream, done)
            self._flush()
            self._rest_if_idle()

    def grant(self, stream: int, size: int) -> None:
        self._protocol.grant(stream, size)
        self._flush()

    def close(self) -> None:
        self._connecting.cancel()
        self._write()
        self._end("the router closed the connection")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        enable_keepalive(transport.get_extra_info("socket"))
        self._write()

    def data_received(self, data: bytes) -> None:
        wakes: list[Callable[[], None]] = []
        try:
            for message in self._protocol.receive(data):
                if isinstance(message, StreamItem):
                    if (wake := self._listeners[message.stream].received(message.item)) is not None:
                        wakes.append(wake)
                    continue
                listener = self._listeners.pop(message.stream)
                if isinstance(message, Reply):
                    cast(_Answer, listener).received(message.value)
                else:
                    listener.ended(None, message.failure)
        except RpcProtocolError as error:
            self._end(str(error))
            return
        finally:
            for wake in wakes:
                wake()
        if self._protocol.has_messages:
            self._flush()  # calls queued until the RpcWelcome
        self._rest_if_idle()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection was lost{f': {error!r}' if error else ''}")

    async def _connect(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: self, self.address.host, self.address.port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            self._end(f"cannot connect: {error!r}")

    def _begin(self, stream: int, listener: Listener) -> None:
        self._listeners[stream] = listener
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._flush()

    def _flush(self) -> None:
        """Schedule `_write`, so that one frame has the messages of a turn of the event loop."""
        if self._flushing is None and self._transport is not None:
            self._flushing = asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._flushing = None
        if self._transport is not None and not self._over and (frame := self._protocol.take()):
            self._transport.write(frame)

    def _rest_if_idle(self) -> None:
        if not self.streams and self._idle is None and not self._over:
            self._idle = asyncio.get_running_loop().call_later(IDLE_CONNECTION_S, self.close)

    def _end(self, lost: str) -> None:
        if self._over:
            return
        self._over = True
        self._closed(self)
        if self._idle is not None:
            self._idle.cancel()
        if self._transport is not None:
            self._transport.abort()
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener.ended(lost)


class Channels:
    def __init__(self, tls: ReloadedTls | None = None) -> None:
        self._tls = tls
        self._channels: dict[RpcAddress, Channel] = {}

    def to(self, address: RpcAddress) -> Channel:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = Channel(
                address, self._closed, None if self._tls is None else self._tls.context()
            )
        return channel

    def close(self) -> None:
        for channel in list(self._channels.values()):
            channel.close()

    def _closed(self, channel: Channel) -> None:
        if self._channels.get(channel.address) is channel:
            del self._channels[channel.address]
