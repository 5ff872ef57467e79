"""Both roles' handles in this process: replicas that are generators, and counts of the router's
slots.

The router's side is real. `Handle` keeps the contract of `EnginePool`: a slot is held while its
context is open, a call runs until it ends or is cancelled.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from ray.serve.handle import DeploymentBroadcastResponse

from actors.errors import EngineDownError
from actors.policy.stores import EngineStore
from actors.request import Accepted, Call, Heartbeat, TokenSource
from actors.router.models.model_router import ModelEngines
from actors.router.router import Router
from configs.settings.router import RouterLimits

Serve = Callable[[Call, int], AsyncGenerator[Any, None]]
"""Behaviour of a replica for its n-th call (from 1)."""

SOURCE = TokenSource("model")
"""Identity of the engines in these tests."""

METADATA: dict[str, Any] = {
    "producer": {
        "remote_engine_id": "e",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
        "first_token_multiple": 16,
    }
}


@dataclass
class Replica:
    """A replica.

    `serve` answers its calls; `calls` are the accepted ones. After `left` it can still be chosen.
    """

    name: str
    serve: Serve
    left: bool = False
    identity: str = SOURCE.engine
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True)
class FakeSlot:
    replica: Replica
    metadata: dict[str, Any]
    maybe_full: bool = False

    @property
    def replica_id(self) -> str:
        return self.replica.name

    @property
    def identity(self) -> str:
        return self.replica.identity


class _Items(asyncio.Queue[Any]):
    """Items that have not been read yet."""

    def only_signs_of_life(self) -> bool:
        return all(isinstance(item, Heartbeat) for item in self._queue)  # type: ignore[attr-defined]


class Response:
    """A running call, read item by item."""

    def __init__(self, handle: Handle, slot: FakeSlot, call: Call) -> None:
        self._handle = handle
        self.sent_at = time.monotonic()
        self._items = _Items()
        self._task = asyncio.create_task(self._run(slot.replica, call), name=f"call to {slot.replica_id}")
        handle.running += 1
        self._task.add_done_callback(self._ended)

    async def _run(self, replica: Replica, call: Call) -> None:
        await asyncio.sleep(0)
        if replica.left:
            raise EngineDownError(f"the connection to {replica.name} is gone")
        replica.calls.append(call)
        self._items.put_nowait(Accepted(replica.name))
        async with aclosing(replica.serve(call, len(replica.calls))) as items:
            async for item in items:
                self._items.put_nowait(item)
                await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._handle.running -= 1
        error: BaseException = (
            EngineDownError("cancelled") if task.cancelled() else task.exception() or StopAsyncIteration()
        )
        self._items.put_nowait(error)

    @property
    def waits(self) -> bool:
        return self._items.only_signs_of_life()

    async def next(self, until: float | None = None) -> Any:
        async with asyncio.timeout_at(until):
            item = await self._items.get()
        if isinstance(item, BaseException):
            self._items.put_nowait(item)
            raise item
        return item

    def cancel(self) -> None:
        self._task.cancel()


class Reply:
    """Result of one replica in Serve: `value` after `late_s`, raised if it is an exception."""

    def __init__(self, value: object, late_s: float = 0.0) -> None:
        self._value = value
        self._late_s = late_s

    async def get_async(self) -> Any:
        await asyncio.sleep(self._late_s)
        if isinstance(self._value, BaseException):
            raise self._value
        return self._value


def broadcast(
    *replies: Reply, problem: Exception | None = None, loop: asyncio.AbstractEventLoop | None = None
) -> DeploymentBroadcastResponse:
    """Return Serve's own object over these replies.

    `problem` is the reason why no replica can be called, `loop` is Serve's loop.
    """

    async def sent() -> list[Any]:
        await asyncio.sleep(0)
        if problem is not None:
            raise problem
        return list(replies)

    return DeploymentBroadcastResponse(sent(), loop)


class Handle:
    """A role's handle. `taken` slots and `running` calls are zero when it is idle."""

    def __init__(self, replicas: Iterable[Replica]) -> None:
        self.replicas = list(replicas)
        self.taken = 0
        self.running = 0
        self.discarded: list[str] = []
        self.delivered: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """Event of each transfer, set when its KV has arrived."""
        self.in_order = False
        """Whether the last of the free replicas is chosen, instead of the next in turn."""
        self.leaving = False
        """Whether the router is stopping."""
        self.grants_at_once = False
        """Whether a request gets a free slot without a wait."""
        self.silent = False
        """Whether no engine can be reached."""
        self.metadata = METADATA
        """Metadata of each replica."""
        self._turn = 0
        self._known = False

    def take_now(
        self, avoid: Iterable[str] = (), prefer: Sequence[str] = (), sequences: int = 1, identity: str | None = None
    ) -> FakeSlot | None:
        self._known = True
        free = self._usable(avoid, identity)
        return self._slot(free, prefer) if self.grants_at_once and free else None

    async def take(
        self,
        avoid: Iterable[str] = (),
        prefer: Sequence[str] = (),
        sequences: int = 1,
        part: bool = False,
        identity: str | None = None,
    ) -> FakeSlot:
        self._known = True
        free = self._usable(avoid, identity)
        await asyncio.sleep(0)
        if not free:
            raise TimeoutError  # the router's timeout has expired: without a real wait here
        return self._slot(free, prefer)

    def _usable(self, avoid: Iterable[str], identity: str | None) -> list[Replica]:
        return [one for one in self.replicas if one.name not in avoid and identity in (None, one.identity)]

    def _slot(self, free: list[Replica], prefer: Sequence[str]) -> FakeSlot:
        self._turn += 1
        self.taken += 1
        preferred = [one for name in prefer for one in free if one.name == name and not self.in_order]
        return FakeSlot((preferred or [free[-1 if self.in_order else self._turn % len(free)]])[0], self.metadata)

    def give_back(self, slot: FakeSlot) -> None:
        self.taken -= 1

    def dispatch(self, slot: FakeSlot, call: Call, *_: Any) -> Response:
        return Response(self, slot, call)

    def stores(self) -> dict[str, EngineStore]:
        return {}

    def identities(self) -> dict[str, str]:
        return {replica.name: replica.identity for replica in self.replicas} if self._known else {}

    def ongoing(self) -> dict[str, int] | None:
        """A pool whose replicas become known with the first request."""
        return {replica.name: 0 for replica in self.replicas} if self._known else None

    @property
    def replica_count(self) -> int:
        return len(self.replicas) if self._known else 0

    def same_replica(self, name: str) -> frozenset[str]:
        """Names of data-parallel ranks are those that Serve's metadata gives them:
        `<replica>-dp<rank>`.
        """
        whole = name.partition("-dp")[0]
        return frozenset(one.name for one in self.replicas if one.name.partition("-dp")[0] == whole) | {name}

    def has_engines(self, avoid: AbstractSet[str] = frozenset(), identity: str | None = None) -> bool:
        return bool(self._usable(avoid, identity))

    @property
    def slots(self) -> int:
        return 100 * len(self.replicas)

    async def ask(self, slot: FakeSlot, method: str, *arguments: Any) -> None:
        assert method == "discard"
        if self.silent:
            raise EngineDownError("the connection was lost")
        self.discarded += arguments

    @property
    def calls(self) -> list[Call]:
        return [call for replica in self.replicas for call in replica.calls]


def router_of(limits: RouterLimits, *handles: Handle) -> Router:
    """Return the router before both roles' handles."""
    engines: Any = handles
    return Router(limits, ModelEngines(*engines))


async def at_rest(*handles: Handle) -> None:
    """Wait until the router has no slot, call or task left. Raises TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while True:
            if not any(handle.taken or handle.running for handle in handles) and len(asyncio.all_tasks()) == 1:
                break
            await asyncio.sleep(0.001)
