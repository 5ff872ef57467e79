"""The engines of one role, as a router calls them: a place with one of them, then a call to its door.

Serve says which engines there are, starts and stops them; requests do not pass through it (docs/decisions/0108).
"""

import asyncio
import socket
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from actors.asgi_call import Accepted, Call
from actors.door import Address, kept_alive
from actors.engine import EngineDownError
from actors.journal import CannotResumeError
from actors.leg import RefusedError
from actors.places import Places
from actors.routing import Roster, engines_of
from actors.wire import Failure, Order, Unpacker, WireError, pack_order
from connectors.errors import TandemError

CONNECT_S = 5.0
"""How long a host may take to accept a connection; normally less than a millisecond."""

IDLE_CONNECTION_S = 60.0
"""How long a connection is kept for the next call; doors keep it longer."""


class EngineError(TandemError):
    """A call failed in an engine's process, with an error that is none of the client's."""


@dataclass(frozen=True)
class Place:
    """The right to make one call."""

    replica_id: str
    address: Address
    metadata: Mapping[str, Any]


class EngineCall:
    """A call that runs: items, one after the other, until StopAsyncIteration. To be cancelled if it is not read to
    its end.

    Raises EngineDownError where the engine, its process or its host is gone, RefusedError where it does not take the
    call, CannotResumeError, EngineError.
    """

    def __init__(self, place: Place, places: Places, opening: Any) -> None:
        self._place = place
        self._places = places
        self._opening: asyncio.Task[aiohttp.ClientResponse] = asyncio.create_task(
            opening, name=f"opens-call-to-{place.replica_id}"
        )
        self._items: deque[Any] = deque()
        self._unpacker = Unpacker()

    async def __anext__(self) -> Any:
        while not self._items:
            data = await self._read()
            try:
                self._items.extend(self._unpacker.feed(data))
            except WireError as error:
                raise EngineDownError(f"what {self._place.replica_id} says cannot be read: {error}") from error
        item = self._items.popleft()
        if isinstance(item, Failure):
            raise self._error(item)
        if isinstance(item, Accepted):
            self._places.heard(self._place.replica_id, item.ongoing)
        return item

    def cancel(self) -> None:
        """Close the connection, which ends the call in the engine."""
        if not self._opening.done():
            self._opening.cancel()
        elif not self._opening.cancelled() and self._opening.exception() is None:
            self._opening.result().close()

    async def _read(self) -> bytes:
        try:
            response = await asyncio.shield(self._opening)
            if response.status != 200:
                said = (await response.text())[:200]
                raise EngineDownError(f"the door of {self._place.replica_id} answers {response.status}: {said}")
            data = await response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise EngineDownError(f"the connection to {self._place.replica_id} is gone: {error!r}") from error
        except asyncio.CancelledError:
            if self._opening.cancelled():
                raise EngineDownError("the call was cancelled") from None
            raise
        if not data:
            if not self._unpacker.empty:
                raise EngineDownError(f"{self._place.replica_id} ended in the middle of an item")
            raise StopAsyncIteration
        return data

    def _error(self, failure: Failure) -> TandemError:
        match failure.kind:
            case "full":
                self._places.full(self._place.replica_id)
                return RefusedError(failure.message)
            case "leaving":
                self._places.leaving(self._place.replica_id)
                return RefusedError(failure.message)
            case "engine_down":
                return EngineDownError(failure.message)
            case "cannot_resume":
                return CannotResumeError(failure.message)
            case _:
                return EngineError(failure.message)


class Engines:
    """One role's engines."""

    def __init__(self, handle: DeploymentHandle) -> None:
        # Options start Serve's updates of what runs, where a plain handle waits for its first call.
        self._handle = handle.options()
        self._places = Places(lambda: engines_of(handle.deployment_id))
        self._router = uuid.uuid4().hex
        self._session: aiohttp.ClientSession | None = None

    @asynccontextmanager
    async def choose_replica(
        self, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = (), roster: Roster | None = None
    ) -> AsyncGenerator[Place, None]:
        """A place with an engine that is not one to `avoid`, the first of `prefer` that has one, else the least busy.

        Waits for one until it is cancelled; raises OverloadedError where too many wait. `roster` gets to know all.
        """
        if roster is not None:
            roster.attach(self._places.ongoing)
        while True:
            name = await self._places.take(avoid, prefer)
            try:
                engine = engines_of(self._handle.deployment_id).get(name)
                if engine is not None:  # it may have gone since it was chosen
                    yield Place(name, engine.address, engine.metadata)
                    return
            finally:
                self._places.give_back(name)

    def dispatch(self, place: Place, call: Call, transfer_id: str | None = None, hold_s: float = 0.0) -> EngineCall:
        """Make the call of `place`; a prefill leg has a transfer, and is held after its answer for at most `hold_s`."""
        order = Order(call, self._router, self._places.waiting, transfer_id, hold_s)
        return EngineCall(place, self._places, self._open(place, order))

    @property
    def places_taken(self) -> int:
        """Places that are held for calls of this router."""
        return self._places.taken

    def broadcast(self, method: str, *arguments: object) -> DeploymentBroadcastResponse:
        """Call a method of all replicas, through Serve: what is no part of serving a request."""
        return self._handle.broadcast(method, *arguments)

    async def close(self) -> None:
        """End all connections."""
        if self._session is not None:
            await self._session.close()

    async def _open(self, place: Place, order: Order) -> aiohttp.ClientResponse:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S, socket_factory=_connection)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        headers = {"Authorization": place.address.key}
        return await self._session.post(place.address.url, data=pack_order(order), headers=headers)


def _connection(info: aiohttp.AddrInfoType) -> socket.socket:
    family, kind, protocol, *_ = info
    made = socket.socket(family, kind, protocol)
    kept_alive(made)
    made.setblocking(False)
    return made
