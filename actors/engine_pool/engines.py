"""The engines of one role, as a router calls them: a place with one of them, then a call to its door.

Serve says which engines there are, starts and stops them; requests do not pass through it (docs/decisions/0108).
"""

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from actors.engine_pool.discovery import Roster, engines_of
from actors.engine_pool.slots import Places
from actors.errors import CannotResumeError, EngineDownError, EngineError, RefusedError
from actors.request import Accepted, Alive, Call, Chunk
from actors.rpc.address import Address
from actors.rpc.client import UNREAD_BYTES, ConnectionsSnapshot, Line, Lines
from actors.rpc.messages import Failure, Order
from connectors.errors import TandemError


@dataclass
class Place:
    """The right to make one call."""

    replica_id: str
    address: Address
    metadata: Mapping[str, Any]
    doubtful: bool = False
    """Whether the engine may well refuse it: other routers have its places."""
    served: bool = False
    """Whether the engine has taken the call."""


class EngineCall:
    """A call that runs: items, one after the other, until StopAsyncIteration. To be cancelled if it is not read to
    its end.

    Raises EngineDownError where the engine, its process or its host is gone, RefusedError where it does not take the
    call, CannotResumeError, EngineError.
    """

    def __init__(self, place: Place, places: Places) -> None:
        self.sent_at = time.monotonic()
        """Made before it is sent: as `actors.router.leg.Items` has it."""
        self._place = place
        self._places = places
        self._items: deque[Any] = deque()
        self._unread_bytes = 0
        self._news = asyncio.Event()
        self._line: Line | None = None
        self._is_over = False
        self._lost: str | None = None

    @property
    def wanted(self) -> bool:
        """Whether it has not been cancelled."""
        return not self._is_over

    @property
    def unread_bytes(self) -> int:
        """Approximate size of the items that have arrived and were not read."""
        return self._unread_bytes

    @property
    def waits(self) -> bool:
        """Whether the next item that says more than that the engine lives is still to come."""
        return not self._is_over and all(isinstance(item, Alive) for item in self._items)

    def began(self, line: Line) -> None:
        """By `line` it can be cancelled."""
        self._line = line

    def came(self, item: Any) -> None:
        """The engine has said something."""
        self._items.append(item)
        self._unread_bytes += _bytes(item)
        if self._unread_bytes > UNREAD_BYTES and self._line is not None:
            self._line.pause()
        self._news.set()

    def over(self, lost: str | None) -> None:
        """It will say no more."""
        self._line = None
        self._is_over = True
        self._lost = lost
        self._news.set()

    async def __anext__(self) -> Any:
        while not self._items:
            if self._is_over:
                if self._lost is None:
                    raise StopAsyncIteration
                raise EngineDownError(f"{self._place.replica_id}: {self._lost}")
            self._news.clear()
            await self._news.wait()
        item = self._items.popleft()
        self._unread_bytes -= _bytes(item)
        if self._line is not None and self._unread_bytes <= UNREAD_BYTES / 2:
            self._line.resume()
        if isinstance(item, Failure):
            raise self._error(item)
        if isinstance(item, Accepted):
            self._place.served = True
            self._places.heard(self._place.replica_id, item.ongoing)
        return item

    def cancel(self) -> None:
        """End the call in the engine."""
        if self._line is not None:
            self._line.cancel()
        if not self._is_over:
            self.over("the call was cancelled")

    def _error(self, failure: Failure) -> TandemError:
        match failure.kind:
            case "full":
                self._places.full(self._place.replica_id)
                return RefusedError(failure.message)
            case "leaving":
                self._places.leaving(self._place.replica_id)
                return RefusedError(failure.message)
            case "engine_down" | "stranger":
                return EngineDownError(f"{self._place.replica_id}: {failure.message}")
            case "cannot_resume":
                return CannotResumeError(failure.message)
            case _:
                return EngineError(failure.message)


def _bytes(item: Any) -> int:
    """About what `item` takes while it waits to be read."""
    match item:
        case bytes():
            return len(item)
        case Chunk():
            return len(item.body)
        case _:
            return 100


class Engines:
    """One role's engines."""

    def __init__(self, handle: DeploymentHandle) -> None:
        # Options start Serve's updates of what runs, where a plain handle waits for its first call.
        self._handle = handle.options()
        self._places = Places(lambda: engines_of(handle.deployment_id))
        self._router = uuid.uuid4().hex
        self._lines = Lines()

    async def take(
        self, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = (), roster: Roster | None = None
    ) -> Place:
        """A place with an engine that is not one to `avoid`, the first of `prefer` that has one, else the least busy.
        To be given back.

        Waits for one until it is cancelled; raises OverloadedError where too many wait. `roster` gets to know all.
        """
        if roster is not None:
            roster.attach(self._places.ongoing)
        while True:
            name = await self._places.take(avoid, prefer)
            try:
                engine = engines_of(self._handle.deployment_id).get(name)
                if engine is not None:
                    return Place(name, engine.address, engine.metadata, self._places.doubtful(name))
            except BaseException:
                self._places.give_back(name, served=False)
                raise
            self._places.give_back(name, served=False)  # it has gone since it was chosen

    def give_back(self, place: Place) -> None:
        """Its call has ended, or was not made."""
        self._places.give_back(place.replica_id, served=place.served)

    def dispatch(self, place: Place, call: Call, transfer_id: str | None = None, hold_s: float = 0.0) -> EngineCall:
        """Make the call of `place`; a prefill leg has a transfer, and is held after its answer for at most `hold_s`."""
        order = Order(call, self._router, self._places.waiting, transfer_id, hold_s, place.doubtful)
        running = EngineCall(place, self._places)
        self._lines.call(place.address, order, running)
        return running

    def has_engines(self) -> bool:
        """Whether there is any engine that takes calls."""
        return bool(self._places.ongoing())

    @property
    def places_taken(self) -> int:
        """Places that are held for calls of this router."""
        return self._places.taken

    def broadcast(self, method: str, *arguments: object) -> DeploymentBroadcastResponse:
        """Call a method of all replicas, through Serve: what is no part of serving a request."""
        return self._handle.broadcast(method, *arguments)

    def snapshot(self) -> ConnectionsSnapshot:
        """Return how many connections there are now."""
        return self._lines.snapshot()

    async def close(self) -> None:
        """End all connections."""
        self._lines.close()
