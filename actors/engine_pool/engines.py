"""The engines of one role as a router calls them: take a slot, then send a call to the engine's RPC
server.

Serve starts and stops engines and reports which ones run. Requests do not pass through Serve
(docs/decisions/0036).
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.engine_pool.discovery import replicas_of, subscribe
from actors.engine_pool.slots import SlotPool
from actors.errors import CannotResumeError, EngineDownError, EngineError, RefusedError
from actors.request import Accepted, Call, Heartbeat, Item
from actors.rpc.address import RpcAddress
from actors.rpc.client import Channel, Channels, ChannelsSnapshot
from actors.rpc.messages import RpcFailure, RpcRequest
from actors.rpc.protocol import GRANT_BYTES, item_bytes
from connectors.errors import TandemError

logger = logging.getLogger(__name__)


@dataclass
class Slot:
    """Permission to make one call to one replica."""

    replica_id: str
    address: RpcAddress
    metadata: Mapping[str, Any]
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
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._channel: Channel | None = None
        self._stream = 0
        self._consumed_bytes = 0
        self._is_over = False
        self._lost: str | None = None
        self._failure: RpcFailure | None = None

    def send(self, channel: Channel, request: RpcRequest) -> None:
        """Send the call."""
        self._channel = channel
        self._stream = channel.call(request, self)

    @property
    def waits(self) -> bool:
        """True while an item other than a heartbeat is still to arrive."""
        return not self._is_over and all(isinstance(item, Heartbeat) for item in self._items)

    def received(self, item: Item) -> None:
        """Queue an item; the channel bounds their size."""
        self._items.append(item)
        self._wake()

    def ended(self, lost: str | None, failure: RpcFailure | None = None) -> None:
        """Mark the call as ended; `lost` or `failure` is the reason when its answer is incomplete."""
        self._channel = None
        self._is_over = True
        self._lost = lost
        self._failure = failure
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def __anext__(self) -> Item:
        while not self._items:
            if self._failure is not None:
                failure, self._failure = self._failure, None
                raise self._error(failure)
            if self._is_over:
                if self._lost is None:
                    raise StopAsyncIteration
                raise EngineDownError(f"{self._slot.replica_id}: {self._lost}")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        item = self._items.popleft()
        self._consumed_bytes += item_bytes(item)
        if self._consumed_bytes >= GRANT_BYTES and self._channel is not None:
            self._channel.grant(self._stream, self._consumed_bytes)
            self._consumed_bytes = 0
        if isinstance(item, Accepted):
            self._slot.served = True
            self._slots.record_accepted(self._slot.replica_id, item.ongoing)
        return item

    def cancel(self) -> None:
        """Cancel the call in the engine."""
        if self._channel is not None:
            self._channel.cancel(self._stream)
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
            case "engine_down":
                return EngineDownError(f"{self._slot.replica_id}: {failure.message}")
            case "cannot_resume":
                return CannotResumeError(failure.message)
            case _:
                return EngineError(failure.message)


class EnginePool:
    """The engines of one role."""

    def __init__(self, handle: DeploymentHandle) -> None:
        # A handle with options receives Serve's updates at once; a plain one only after its first
        # call.
        self._handle = handle.options()
        self._slots = SlotPool(lambda: replicas_of(handle.deployment_id) or {})
        self._router = uuid.uuid4().hex
        self._channels = Channels()
        self._unsubscribe: Callable[[], None] | None = None

    async def take(self, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = ()) -> Slot:
        """Take a slot on a replica that is not in `avoid`: the first free one of `prefer`, else the
        least busy.

        Waits until it is cancelled. Give the slot back with `give_back`. Raises OverloadedError
        when too many requests wait.
        """
        if self._unsubscribe is None:
            self._unsubscribe = subscribe(
                self._handle.deployment_id, partial(_call, self._slots.changed, asyncio.get_running_loop())
            )
        while True:
            name = await self._slots.take(avoid, prefer)
            try:
                engine = (replicas_of(self._handle.deployment_id) or {}).get(name)
                if engine is not None:
                    return Slot(name, engine.address, engine.metadata, self._slots.maybe_full(name))
            except BaseException:
                self._slots.give_back(name, served=False)
                raise
            self._slots.give_back(name, served=False)  # the replica has gone since it was chosen

    def give_back(self, slot: Slot) -> None:
        """Return a slot after its call has ended or was not made."""
        self._slots.give_back(slot.replica_id, served=slot.served)

    def dispatch(self, slot: Slot, call: Call, transfer_id: str | None = None, hold_s: float = 0.0) -> EngineCall:
        """Send a call on `slot`.

        A prefill leg has a transfer id; the engine counts it as ongoing for at most `hold_s` after
        its answer.
        """
        request = RpcRequest(call, self._router, self._slots.waiting, transfer_id, hold_s, slot.maybe_full)
        running = EngineCall(slot, self._slots)
        running.send(self._channels.to(slot.address), request)
        return running

    def ongoing(self) -> Mapping[str, int] | None:
        """Return the ongoing requests of each replica that accepts calls; None until Serve has
        reported the replicas."""
        return None if replicas_of(self._handle.deployment_id) is None else self._slots.ongoing()

    def has_engines(self) -> bool:
        """Return whether any engine accepts calls."""
        return bool(self._slots.ongoing())

    @property
    def slots_taken(self) -> int:
        """Number of slots that this router holds."""
        return self._slots.taken

    async def ask(self, slot: Slot, method: str, *arguments: object) -> Any:
        """Return the result of one of the engine's methods on the replica of `slot`.

        Raises EngineDownError or EngineError.
        """
        return await self._channels.to(slot.address).ask(method, *arguments)

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]:
        """Return the results of one of the engines' methods; leave out replicas that fail or are
        late."""
        replicas = replicas_of(self._handle.deployment_id) or {}
        asked = [asyncio.create_task(self._channels.to(one.address).ask(method)) for one in replicas.values()]
        if not asked:
            return []
        done, late = await asyncio.wait(asked, timeout=timeout_s)
        for task in late:
            task.cancel()
        for name, task in zip(replicas, asked, strict=True):
            if task in late or task.exception() is not None:
                problem = f"no answer within {timeout_s:g} s" if task in late else repr(task.exception())
                logger.warning("%s of replica %s failed: %s", method, name, problem)
        return [task.result() for task in asked if task in done and task.exception() is None]

    def snapshot(self) -> ChannelsSnapshot:
        """Return the number of connections."""
        return self._channels.snapshot()

    async def close(self) -> None:
        """Close all connections."""
        self._channels.close()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None


def _call(do: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Run `do` in `loop` from any thread, unless the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(do)
