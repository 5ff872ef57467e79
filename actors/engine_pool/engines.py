"""The engines of one role, as a router calls them: a slot with one of them, then a call to its door.

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

from actors.engine_pool.discovery import ReplicaRegistry, engines_of
from actors.engine_pool.slots import SlotPool
from actors.errors import CannotResumeError, EngineDownError, EngineError, RefusedError
from actors.request import Accepted, Call, Heartbeat, StreamChunk
from actors.rpc.address import RpcAddress
from actors.rpc.client import UNREAD_BYTES, Connection, ConnectionPool, ConnectionsSnapshot
from actors.rpc.messages import RpcFailure, RpcRequest
from connectors.errors import TandemError


@dataclass
class Slot:
    """The right to make one call."""

    replica_id: str
    address: RpcAddress
    metadata: Mapping[str, Any]
    maybe_full: bool = False
    """Whether the engine may well refuse it: other routers have its slots."""
    served: bool = False
    """Whether the engine has taken the call."""


class EngineCall:
    """A call that runs: items, one after the other, until StopAsyncIteration. To be cancelled if it is not read to
    its end.

    Raises EngineDownError where the engine, its process or its host is gone, RefusedError where it does not take the
    call, CannotResumeError, EngineError.
    """

    def __init__(self, slot: Slot, slots: SlotPool) -> None:
        self.sent_at = time.monotonic()
        """Made before it is sent: as `actors.router.leg.Items` has it."""
        self._slot = slot
        self._slots = slots
        self._items: deque[Any] = deque()
        self._unread_bytes = 0
        self._news = asyncio.Event()
        self._connection: Connection | None = None
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
        return not self._is_over and all(isinstance(item, Heartbeat) for item in self._items)

    def began(self, connection: Connection) -> None:
        """By `connection` it can be cancelled."""
        self._connection = connection

    def came(self, item: Any) -> None:
        """The engine has said something."""
        self._items.append(item)
        self._unread_bytes += _bytes(item)
        if self._unread_bytes > UNREAD_BYTES and self._connection is not None:
            self._connection.pause()
        self._news.set()

    def over(self, lost: str | None) -> None:
        """It will say no more."""
        self._connection = None
        self._is_over = True
        self._lost = lost
        self._news.set()

    async def __anext__(self) -> Any:
        while not self._items:
            if self._is_over:
                if self._lost is None:
                    raise StopAsyncIteration
                raise EngineDownError(f"{self._slot.replica_id}: {self._lost}")
            self._news.clear()
            await self._news.wait()
        item = self._items.popleft()
        self._unread_bytes -= _bytes(item)
        if self._connection is not None and self._unread_bytes <= UNREAD_BYTES / 2:
            self._connection.resume()
        if isinstance(item, RpcFailure):
            raise self._error(item)
        if isinstance(item, Accepted):
            self._slot.served = True
            self._slots.heard(self._slot.replica_id, item.ongoing)
        return item

    def cancel(self) -> None:
        """End the call in the engine."""
        if self._connection is not None:
            self._connection.cancel()
        if not self._is_over:
            self.over("the call was cancelled")

    def _error(self, failure: RpcFailure) -> TandemError:
        match failure.kind:
            case "full":
                self._slots.full(self._slot.replica_id)
                return RefusedError(failure.message)
            case "leaving":
                self._slots.leaving(self._slot.replica_id)
                return RefusedError(failure.message)
            case "engine_down" | "stranger":
                return EngineDownError(f"{self._slot.replica_id}: {failure.message}")
            case "cannot_resume":
                return CannotResumeError(failure.message)
            case _:
                return EngineError(failure.message)


def _bytes(item: Any) -> int:
    """About what `item` takes while it waits to be read."""
    match item:
        case bytes():
            return len(item)
        case StreamChunk():
            return len(item.body)
        case _:
            return 100


class EnginePool:
    """One role's engines."""

    def __init__(self, handle: DeploymentHandle) -> None:
        # Options start Serve's updates of what runs, where a plain handle waits for its first call.
        self._handle = handle.options()
        self._slots = SlotPool(lambda: engines_of(handle.deployment_id))
        self._router = uuid.uuid4().hex
        self._pool = ConnectionPool()

    async def take(
        self, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = (), registry: ReplicaRegistry | None = None
    ) -> Slot:
        """A slot with an engine that is not one to `avoid`, the first of `prefer` that has one, else the least busy.
        To be given back.

        Waits for one until it is cancelled; raises OverloadedError where too many wait. `registry` gets to know all.
        """
        if registry is not None:
            registry.attach(self._slots.ongoing)
        while True:
            name = await self._slots.take(avoid, prefer)
            try:
                engine = engines_of(self._handle.deployment_id).get(name)
                if engine is not None:
                    return Slot(name, engine.address, engine.metadata, self._slots.maybe_full(name))
            except BaseException:
                self._slots.give_back(name, served=False)
                raise
            self._slots.give_back(name, served=False)  # it has gone since it was chosen

    def give_back(self, slot: Slot) -> None:
        """Its call has ended, or was not made."""
        self._slots.give_back(slot.replica_id, served=slot.served)

    def dispatch(self, slot: Slot, call: Call, transfer_id: str | None = None, hold_s: float = 0.0) -> EngineCall:
        """Make the call of `slot`; a prefill leg has a transfer, and is held after its answer for at most `hold_s`."""
        order = RpcRequest(call, self._router, self._slots.waiting, transfer_id, hold_s, slot.maybe_full)
        running = EngineCall(slot, self._slots)
        self._pool.call(slot.address, order, running)
        return running

    def has_engines(self) -> bool:
        """Whether there is any engine that takes calls."""
        return bool(self._slots.ongoing())

    @property
    def slots_taken(self) -> int:
        """Slots that are held for calls of this router."""
        return self._slots.taken

    def broadcast(self, method: str, *arguments: object) -> DeploymentBroadcastResponse:
        """Call a method of all replicas, through Serve: what is no part of serving a request."""
        return self._handle.broadcast(method, *arguments)

    def snapshot(self) -> ConnectionsSnapshot:
        """Return how many connections there are now."""
        return self._pool.snapshot()

    async def close(self) -> None:
        """End all connections."""
        self._pool.close()
