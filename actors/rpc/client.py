"""A router's connections to engines' doors. Each carries one call at a time, and is kept for the next."""

import asyncio
from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from actors.rpc.address import RpcAddress, enable_keepalive
from actors.rpc.messages import RpcCancel, RpcEnd, RpcHello, RpcProtocolError, RpcRequest, Unpacker, pack

CONNECT_S = 5.0
"""How long a host may take to accept a connection; normally less than a millisecond."""

IDLE_CONNECTION_S = 60.0
"""How long a connection is kept for the next call."""

END_S = 20.0
"""How long a call that is cancelled may take to end in its engine until its connection is closed."""

UNREAD_BYTES = 2**20
"""What may have come of an answer that is not read, before the engine is left to wait."""


class Listener(Protocol):
    """Who makes a call."""

    @property
    def wanted(self) -> bool:
        """Whether it still wants the call: connecting takes time."""

    def began(self, connection: "Connection") -> None:
        """The call is made by `connection`, until it is over."""

    def came(self, item: Any) -> None:
        """The next item."""

    def over(self, lost: str | None) -> None:
        """There are no more; `lost` says why where the call was not answered to its end."""


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
        """Asyncio's hook."""
        self._transport = cast(asyncio.Transport, transport)
        self._pool.made(self)
        enable_keepalive(transport.get_extra_info("socket"))
        self._transport.write(pack(RpcHello(self._address.key)))

    def data_received(self, data: bytes) -> None:
        """Asyncio's hook."""
        try:
            for item in self._unpacker.feed(data):
                if self._listener is None:
                    raise RpcProtocolError(f"{type(item).__name__} where there is no call")
                if isinstance(item, RpcEnd):
                    self._ended(self._listener)
                else:
                    self._listener.came(item)
        except RpcProtocolError as error:
            self._broken = f"what it says cannot be read: {error}"
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Asyncio's hook."""
        self._stop_timer()
        self._pool.lost(self._address, self)
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.over(self._broken or f"the connection is gone{f': {error!r}' if error else ''}")

    def call(self, request: RpcRequest, listener: Listener) -> None:
        """Make the next call; `listener` hears of it until it is over."""
        if self._transport.is_closing():
            listener.over("the connection is gone")
            return
        self._stop_timer()
        self._requests += 1
        self._listener = listener
        self._transport.write(pack(request))
        listener.began(self)

    def rest(self) -> None:
        """Be there for the next call, for a while."""
        self._timer = asyncio.get_running_loop().call_later(IDLE_CONNECTION_S, self._transport.close)
        self._pool.free(self._address, self)

    def cancel(self) -> None:
        """Nobody wants the rest of the call; its listener hears no more of it."""
        if self._listener is not None:
            self._listener = _NOBODY
            self._transport.write(pack(RpcCancel(self._requests)))
            self.resume()
            self._timer = asyncio.get_running_loop().call_later(END_S, self._transport.abort)

    def pause(self) -> None:
        """Have the engine wait."""
        self._paused = True
        self._transport.pause_reading()

    def resume(self) -> None:
        """Have it go on."""
        if self._paused:
            self._paused = False
            self._transport.resume_reading()

    def close(self) -> None:
        """A call that is made by it fails."""
        self._transport.abort()

    def _ended(self, listener: Listener) -> None:
        self._listener = None
        self._stop_timer()
        self.resume()
        self.rest()
        listener.over(None)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Nobody:
    """Hears what comes of a call after it was cancelled."""

    wanted = False

    def began(self, connection: Connection) -> None: ...

    def came(self, item: Any) -> None: ...

    def over(self, lost: str | None) -> None: ...


_NOBODY = _Nobody()


@dataclass(frozen=True, slots=True)
class ConnectionsSnapshot:
    """Number of a router's connections to the engines of one role, and how many of them carry no call; a copy."""

    open: int
    idle: int


class ConnectionPool:
    """Those of a router to the engines of one role."""

    def __init__(self) -> None:
        self._free: defaultdict[RpcAddress, deque[Connection]] = defaultdict(deque)
        self._all: set[Connection] = set()
        self._making: set[asyncio.Task[None]] = set()

    def call(self, address: RpcAddress, request: RpcRequest, listener: Listener) -> None:
        """Make a call over a connection that is free, else over a new one; `listener` hears what becomes of it."""
        free = self._free.get(address)
        if free:
            free.pop().call(request, listener)
            return
        making = asyncio.create_task(self._call_anew(address, request, listener), name=f"connects-to-{address.host}")
        self._making.add(making)
        making.add_done_callback(partial(self._made_or_not, listener))

    def made(self, connection: Connection) -> None:
        """It is connected."""
        self._all.add(connection)

    def free(self, address: RpcAddress, connection: Connection) -> None:
        """It has no call."""
        self._free[address].append(connection)

    def lost(self, address: RpcAddress, connection: Connection) -> None:
        """It is no connection any more."""
        self._all.discard(connection)
        free = self._free.get(address, deque())
        if connection in free:
            free.remove(connection)
        if not free:
            self._free.pop(address, None)  # engines come and go for months

    def close(self) -> None:
        """End all."""
        for making in self._making:
            making.cancel()
        for connection in list(self._all):
            connection.close()

    def snapshot(self) -> ConnectionsSnapshot:
        """Return how many connections there are now."""
        return ConnectionsSnapshot(len(self._all), sum(map(len, self._free.values())))

    def _made_or_not(self, listener: Listener, making: asyncio.Task[None]) -> None:
        self._making.discard(making)
        if making.cancelled():
            listener.over("it was not connected to in time")
        elif (error := making.exception()) is not None:
            listener.over(f"it was not connected to: {error!r}")

    async def _call_anew(self, address: RpcAddress, request: RpcRequest, listener: Listener) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, address), address.host, address.port
                )
        except (OSError, TimeoutError) as error:
            listener.over(f"it takes no connection: {error!r}")
            return
        if listener.wanted:
            connection.call(request, listener)
        else:
            connection.rest()
