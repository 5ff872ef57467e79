"""The engines of one role as a router calls them: take a slot, then send a call to the engine's RPC
server.

Serve starts and stops engines and reports which ones run. Requests do not pass through Serve
(docs/decisions/0036).
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

from actors.engine_pool.discovery import replicas_of
from actors.engine_pool.slots import SlotPool
from actors.errors import CannotResumeError, EngineDownError, EngineError, RefusedError
from actors.request import Accepted, Call, Heartbeat, StreamChunk
from actors.rpc.address import RpcAddress
from actors.rpc.client import UNREAD_BYTES, Connection, ConnectionPool, ConnectionsSnapshot
from actors.rpc.messages import RpcFailure, RpcRequest
from connectors.errors import TandemError


@dataclass
class Slot:
    """Permission to make one call of `sequences` sequences to one replica."""

    replica_id: str
    address: RpcAddress
    metadata: Mapping[str, Any]
    sequences: int = 1
    maybe_full: bool = False
    """Whether the engine may refuse the call, because other routers may hold its slots."""
    served: bool = False
    """Whether the engine has accepted the call."""


class EngineCall:
    """A running call: an asynchronous iterator of its items. Cancel it unless it is read to its
    end.

    Raises EngineDownError when the engine, its process or its node is gone, RefusedError when the
    engine does not accept the call, CannotResumeError or EngineError when the engine reports that.
    """

    def __init__(self, slot: Slot, slots: SlotPool) -> None:
        self.sent_at = time.monotonic()
        """Time just before the call is sent; see `Items.sent_at` in `router/leg.py`."""
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
        """True until the call is cancelled."""
        return not self._is_over

    @property
    def unread_bytes(self) -> int:
        """Approximate size of the items that have arrived and were not read."""
        return self._unread_bytes

    @property
    def waits(self) -> bool:
        """True while an item other than a heartbeat is still to arrive."""
        return not self._is_over and all(isinstance(item, Heartbeat) for item in self._items)

    def started(self, connection: Connection) -> None:
        """Keep the connection, to cancel the call on it."""
        self._connection = connection

    def received(self, item: Any) -> None:
        """Queue an item; pause the connection above `UNREAD_BYTES`."""
        self._items.append(item)
        self._unread_bytes += _bytes(item)
        if self._unread_bytes > UNREAD_BYTES and self._connection is not None:
            self._connection.pause()
        self._news.set()

    def ended(self, lost: str | None) -> None:
        """Mark the call as ended; `lost` is the reason when its answer is incomplete."""
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
            self._slots.record_accepted(self._slot.replica_id, item.ongoing)
        return item

    def cancel(self) -> None:
        """Cancel the call in the engine."""
        if self._connection is not None:
            self._connection.cancel()
        if not self._is_over:
            self.ended("the call was cancelled")

    def _error(self, failure: RpcFailure) -> TandemError:
        match failure.kind:
            case "full":
                self._slots.record_full(self._slot.replica_id)
                return RefusedError(failure.message)
            case "leaving":
                self._slots.record_leaving(self._slot.replica_id)
                return RefusedError(failure.message)
            case "engine_down" | "stranger":
                return EngineDownError(f"{self._slot.replica_id}: {failure.message}")
            case "cannot_resume":
                return CannotResumeError(failure.message)
            case _:
                return EngineError(failure.message)


def _bytes(item: Any) -> int:
    """Approximate size of `item` in memory."""
    match item:
        case bytes():
            return len(item)
        case StreamChunk():
            return len(item.body)
        case _:
            return 100


class EnginePool:
    """The engines of one role."""

    def __init__(self, handle: DeploymentHandle) -> None:
        # A handle with options receives Serve's updates at once; a plain one only after its first
        # call.
        self._handle = handle.options()
        self._slots = SlotPool(lambda: replicas_of(handle.deployment_id) or {})
        self._router = uuid.uuid4().hex
        self._pool = ConnectionPool()

    async def take(self, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = (), sequences: int = 1) -> Slot:
        """Take slots for `sequences` on a replica that is not in `avoid`: the first free one of
        `prefer`, else the least busy.

        Waits until it is cancelled. Give the slot back with `give_back`. Raises OverloadedError
        when too many requests wait.
        """
        while True:
            name = await self._slots.take(avoid, prefer, sequences)
            try:
                engine = (replicas_of(self._handle.deployment_id) or {}).get(name)
                if engine is not None:
                    return Slot(name, engine.address, engine.metadata, sequences, self._slots.maybe_full(name))
            except BaseException:
                self._slots.give_back(name, sequences, served=False)
                raise
            self._slots.give_back(name, sequences, served=False)  # the replica has gone since it was chosen

    def give_back(self, slot: Slot) -> None:
        """Return a slot after its call has ended or was not made."""
        self._slots.give_back(slot.replica_id, slot.sequences, served=slot.served)

    def dispatch(self, slot: Slot, call: Call, transfer_id: str | None = None, hold_s: float = 0.0) -> EngineCall:
        """Send a call on `slot`.

        A prefill leg has a transfer id; the engine counts it as ongoing for at most `hold_s` after
        its answer.
        """
        order = RpcRequest(call, self._router, self._slots.waiting, transfer_id, hold_s, slot.maybe_full)
        running = EngineCall(slot, self._slots)
        self._pool.call(slot.address, order, running)
        return running

    def ongoing(self) -> Mapping[str, int] | None:
        """Return the ongoing requests of each replica that accepts calls; None until Serve has
        reported the replicas."""
        return None if replicas_of(self._handle.deployment_id) is None else self._slots.ongoing()

    def has_engines(self, avoid: AbstractSet[str] = frozenset()) -> bool:
        """Return whether any engine outside `avoid` accepts calls."""
        return not self._slots.ongoing().keys() <= avoid

    @property
    def slots(self) -> int:
        """Number of slots of all engines."""
        return sum(engine.slots for engine in (replicas_of(self._handle.deployment_id) or {}).values())

    @property
    def slots_taken(self) -> int:
        """Number of slots that this router holds."""
        return self._slots.taken

    def broadcast(self, method: str, *arguments: object) -> DeploymentBroadcastResponse:
        """Call a method of all replicas through Serve, outside the path of requests."""
        return self._handle.broadcast(method, *arguments)

    def snapshot(self) -> ConnectionsSnapshot:
        """Return the number of connections."""
        return self._pool.snapshot()

    async def close(self) -> None:
        """Close all connections."""
        self._pool.close()
