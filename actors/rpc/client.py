"""A router's connections to engines. Each carries one call at a time and is kept for the next."""

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from actors.rpc.address import RpcAddress, enable_keepalive
from actors.rpc.messages import RpcCancel, RpcEnd, RpcHello, RpcProtocolError, RpcRequest, Unpacker, pack

CONNECT_S = 5.0
"""Timeout of a TCP connect; normally less than a millisecond."""

IDLE_CONNECTION_S = 60.0
"""Time after which an idle connection is closed."""

END_S = 20.0
"""Timeout for a cancelled call to end in its engine, after which its connection is closed."""

UNREAD_BYTES = 2**20
"""Size of an unread answer above which the engine is paused."""


class Listener(Protocol):
    """The receiver of a call's items."""

    @property
    def wanted(self) -> bool:
        """True while the call is still needed; connecting takes time."""

    def started(self, connection: "Connection") -> None:
        """Note that `connection` carries the call."""

    def received(self, item: Any) -> None:
        """Receive the next item."""

    def ended(self, lost: str | None) -> None:
        """Note the end of the call; `lost` is the reason when its answer is incomplete."""


class Connection(asyncio.Protocol):
    """One connection."""

    def __init__(self, pool: "ConnectionPool", address: RpcAddress) -> None:
        self._pool = pool
        self._address = address
        self._unpacker = Unpacker()
        self._requests = 0
        self._listener: Listener | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._broken: str | None = None
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the key; asyncio's hook."""
        self._transport = cast(asyncio.Transport, transport)
        self._pool.made(self)
        enable_keepalive(transport.get_extra_info("socket"))
        self._transport.write(pack(RpcHello(self._address.key)))

    def data_received(self, data: bytes) -> None:
        """Deliver items to the call; asyncio's hook."""
        try:
            for item in self._unpacker.feed(data):
                if self._listener is None:
                    raise RpcProtocolError(f"{type(item).__name__} outside a call")
                if isinstance(item, RpcEnd):
                    self._ended(self._listener)
                else:
                    self._listener.received(item)
        except RpcProtocolError as error:
            self._broken = f"invalid message: {error}"
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """End the call; asyncio's hook."""
        self._stop_timer()
        self._pool.lost(self._address, self)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.ended(self._broken or f"the connection was lost{f': {error!r}' if error else ''}")

    def call(self, request: RpcRequest, listener: Listener) -> None:
        """Send the next call; `listener` receives its items."""
        if self._transport.is_closing():
            listener.ended("the connection was lost")
            return
        self._stop_timer()
        self._requests += 1
        self._listener = listener
        self._transport.write(pack(request))
        listener.started(self)

    def rest(self) -> None:
        """Return to the pool until `IDLE_CONNECTION_S` has passed."""
        self._timer = asyncio.get_running_loop().call_later(IDLE_CONNECTION_S, self._transport.close)
        self._pool.free(self._address, self)

    def cancel(self) -> None:
        """Cancel the call; its listener receives nothing more."""
        if self._listener is not None:
            self._listener = _DISCARD
            self._transport.write(pack(RpcCancel(self._requests)))
            self.resume()
            self._timer = asyncio.get_running_loop().call_later(END_S, self._transport.abort)

    def pause(self) -> None:
        """Stop reading, which pauses the engine."""
        self._paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """Close the connection; its call fails."""
        self._transport.abort()

    def _ended(self, listener: Listener) -> None:
        self._listener = None
        self._stop_timer()
        self.resume()
        self.rest()
        listener.ended(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Discard:
    """Discards the items of a cancelled call."""

    wanted = False

    def started(self, connection: Connection) -> None: ...

    def received(self, item: Any) -> None: ...

    def ended(self, lost: str | None) -> None: ...


_DISCARD = _Discard()


@dataclass(frozen=True, slots=True)
class ConnectionsSnapshot:
    """Number of connections to the engines of one role, and number of idle ones."""

    open: int
    idle: int


class ConnectionPool:
    """A router's connections to the engines of one role."""

    def __init__(self) -> None:
        self._free: defaultdict[RpcAddress, deque[Connection]] = defaultdict(deque)
        self._all: set[Connection] = set()
        self._making: set[asyncio.Task[None]] = set()

    def call(self, address: RpcAddress, request: RpcRequest, listener: Listener) -> None:
        """Send a call over an idle or a new connection; `listener` receives its items."""
        free = self._free.get(address)
        if free:
            free.pop().call(request, listener)
            return
        making = asyncio.create_task(self._call_anew(address, request, listener), name=f"connects-to-{address.host}")
        self._making.add(making)
        making.add_done_callback(partial(self._made_or_not, listener))

    def made(self, connection: Connection) -> None:
        """Add a new connection."""
        self._all.add(connection)

    def free(self, address: RpcAddress, connection: Connection) -> None:
        """Add an idle connection."""
        self._free[address].append(connection)

    def lost(self, address: RpcAddress, connection: Connection) -> None:
        """Remove a closed connection."""
        self._all.discard(connection)
        free = self._free.get(address, deque())
        if connection in free:
            free.remove(connection)
        if not free:
            self._free.pop(address, None)  # engines come and go for months

    def close(self) -> None:
        """Close all connections."""
        for making in self._making:
            making.cancel()
        for connection in list(self._all):
            connection.close()

    def snapshot(self) -> ConnectionsSnapshot:
        """Return the number of connections."""
        return ConnectionsSnapshot(len(self._all), sum(map(len, self._free.values())))

    def _made_or_not(self, listener: Listener, making: asyncio.Task[None]) -> None:
        self._making.discard(making)
        if making.cancelled():
            listener.ended("connecting timed out")
        elif (error := making.exception()) is not None:
            listener.ended(f"cannot connect: {error!r}")

    async def _call_anew(self, address: RpcAddress, request: RpcRequest, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, address), address.host, address.port
                )
        except (OSError, TimeoutError) as error:
            listener.ended(f"cannot connect: {error!r}")
            return
        if listener.wanted:
            connection.call(request, listener)
        else:
            connection.rest()
