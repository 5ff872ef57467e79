"""Both roles' handles in this process: replicas that are generators, and counts of the router's
slots.

The router's calls are real, and so are those of decode engines to prefill engines. `Handle` keeps
the contract of `EnginePool`: a call runs until it ends or is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from ray.serve.handle import DeploymentBroadcastResponse

from actors.adapter_records import AdapterRecord, AdapterRecords
from actors.engine.asgi_call import Notices
from actors.engine.split_call import SplitCall
from actors.engine_pool.engine_call import EngineCall
from actors.engine_pool.slots import EngineReplica, Slot, SlotRequest
from actors.errors import CannotResumeError, EngineDownError, RefusedError, UnavailableError
from actors.request import Accepted, Call, TokenSource
from actors.router.model_router import ModelEngines
from actors.router.router import Router
from actors.rpc.address import RpcAddress
from actors.rpc.messages import PrefillOrder, RpcFailure, RpcRequest
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

    `serve` answers its calls; `calls` are those that reach its engine. After `left` it can still be
    chosen, while `stops()` it takes no calls. An engine of `version` 1 ignores orders to call
    prefill.
    """

    name: str
    serve: Serve
    left: bool = False
    stops: Callable[[], bool] = lambda: False
    identity: str = SOURCE.engine
    frontend: str = ""
    version: int = 2
    calls: list[Call] = field(default_factory=list)

    def run(self, call: Call) -> AsyncGenerator[Any, None]:
        self.calls.append(call)
        return self.serve(call, len(self.calls))


@dataclass(frozen=True)
class _End:
    """Last notice of an engine: its error, or None."""

    error: BaseException | None


class Connection:
    """A connection to one replica, as `actors.rpc.client.Channel`: a task runs each call."""

    def __init__(self, handle: Handle, replica: Replica) -> None:
        self._handle = handle
        self._replica = replica
        self._task: asyncio.Task[None] | None = None
        self._discards = False
        """Whether the caller has cancelled the call without KV."""

    def call(self, request: RpcRequest, listener: Any) -> int:
        self._task = asyncio.create_task(self._run(request, listener), name=f"call to {self._replica.name}")
        self._handle.running += 1
        self._task.add_done_callback(self._ended)
        return 1

    def cancel(self, stream: int, done: bool = False) -> None:
        assert self._task is not None
        self._discards = not done
        self._task.cancel()

    def grant(self, stream: int, size: int) -> None:
        """Do nothing: this connection has no credit."""

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._handle.running -= 1

    async def _run(self, request: RpcRequest, listener: Any) -> None:
        await asyncio.sleep(0)
        if self._replica.left:
            listener.ended(f"the connection to {self._replica.name} is gone")
            return
        failure = None
        try:
            async with aclosing(self._items(request)) as items:
                async for item in items:
                    if (wake := listener.received(item)) is not None:
                        wake()
                    await asyncio.sleep(0)
        except EngineDownError as error:
            failure = RpcFailure("engine_down", str(error))
        except CannotResumeError as error:
            failure = RpcFailure("cannot_resume", str(error))
        except RefusedError as error:
            failure = RpcFailure("full", str(error))
        except Exception as error:
            failure = RpcFailure("error", repr(error))
        listener.ended(None, failure)

    async def _items(self, request: RpcRequest) -> AsyncGenerator[Any, None]:
        replica, accepted = self._replica, Accepted(self._replica.name)
        if request.prefill is None or replica.version == 1:
            yield accepted
            items = replica.run(request.call)
        else:
            connections: Any = self
            items = SplitCall(request.call, request.prefill, connections, self._serve, _beats).items(accepted)
        try:
            async with aclosing(items):
                async for item in items:
                    yield item
        finally:
            if request.transfer_id is not None and self._discards:  # as `Prefill.call_and_hold`
                self._handle.discarded.append(request.transfer_id)

    def to(self, address: RpcAddress) -> Any:
        """Return a connection from this decode engine to a prefill engine."""
        prefill = self._handle.prefill
        assert prefill is not None, "`router_of` sets it"
        return prefill.connection(address.host)

    async def _serve(self, call: Call, notices: Notices, began_at: float) -> AsyncGenerator[Any, None]:
        running = asyncio.create_task(self._feed(call, notices), name=f"engine of {self._replica.name}")
        try:
            while not isinstance(item := await notices.get(), _End):
                yield item
            if item.error is not None:
                raise item.error
        finally:
            running.cancel()
            await asyncio.wait({running})

    async def _feed(self, call: Call, notices: Notices) -> None:
        error: BaseException | None = None
        try:
            async with aclosing(self._replica.run(call)) as items:
                async for item in items:
                    notices.put(item)
                    await asyncio.sleep(0)
        except Exception as problem:
            error = problem
        notices.put(_End(error))


@contextmanager
def _beats(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` at intervals, as an engine whose core answers."""

    async def run() -> None:
        while True:
            await asyncio.sleep(0.1)
            beat()

    running = asyncio.create_task(run(), name="beats")
    try:
        yield
    finally:
        running.cancel()


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


class Records(AdapterRecords):
    """Records in this process instead of Ray's control store."""

    def __init__(self, **by_name: AdapterRecord) -> None:
        self.by_name = by_name
        self.lost = False
        """Whether the Ray head is away."""

    def _check(self) -> None:
        if self.lost:
            raise UnavailableError("no head")

    async def names(self) -> list[str]:
        return list(self.by_name)

    async def add(self, name: str, record: AdapterRecord) -> bool:
        self._check()
        return self.by_name.setdefault(name, record) is record

    async def get(self, name: str) -> AdapterRecord | None:
        self._check()
        return self.by_name.get(name)

    async def delete(self, name: str) -> None:
        self._check()
        self.by_name.pop(name, None)

    async def remove(self, name: str, record: AdapterRecord) -> None:
        self._check()
        if self.by_name.get(name) == record:
            del self.by_name[name]


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
        self.stopping = False
        """Whether the router is stopping."""
        self.grants_at_once = False
        """Whether a request gets a free slot without a wait."""
        self.prefill: Handle | None = None
        """The handle of prefill, if this is decode's."""
        self.role = "decode"
        self.full_replicas: frozenset[str] = frozenset()
        """Replicas without a free slot, as far as decisions know."""
        self.metadata = METADATA
        """Metadata of each replica."""
        self._turn = 0
        self._known = False

    def take_now(self, wanted: SlotRequest) -> Slot | None:
        self._known = True
        free = self._usable(wanted.avoid, wanted.identity)
        return self._slot(free, wanted.prefer) if self.grants_at_once and free else None

    async def take(self, wanted: SlotRequest) -> Slot:
        self._known = True
        free = self._usable(wanted.avoid, wanted.identity)
        await asyncio.sleep(0)
        if not free:
            raise TimeoutError  # the router's timeout has expired: without a real wait here
        return self._slot(free, wanted.prefer)

    def _usable(self, avoid: Iterable[str], identity: str | None) -> list[Replica]:
        usable = [one for one in self.replicas if not one.stops()]
        return [one for one in usable if one.name not in avoid and identity in (None, one.identity)]

    def _slot(self, free: list[Replica], prefer: Sequence[str]) -> Slot:
        self._turn += 1
        self.taken += 1
        preferred = [one for name in prefer for one in free if one.name == name and not self.in_order]
        replica = (preferred or [free[-1 if self.in_order else self._turn % len(free)]])[0]
        return Slot(replica.name, self._engine(replica))

    def _engine(self, replica: Replica) -> EngineReplica:
        own = {"identity": replica.identity, "frontend": replica.frontend, "version": replica.version}
        return EngineReplica(RpcAddress(replica.name, 1, ""), 100, 100, self.metadata | own, replica.name)

    def give_back(self, slot: Slot) -> None:
        self.taken -= 1

    def dispatch(self, slot: Slot, call: Call, watcher: Any = None, prefill: PrefillOrder | None = None) -> EngineCall:
        pool: Any = self
        running, connection = EngineCall(self.role, slot, pool, watcher), self.connection(slot.replica_id)
        running.send(connection, RpcRequest(call, *self.caller, prefill=prefill))
        return running

    def connection(self, name: str) -> Any:
        return Connection(self, next(one for one in self.replicas if one.name == name))

    caller = ("router", 0)

    def move(self, slot: Slot, name: str) -> None:
        slot.replica_id = name

    def record(self, slot: Slot, outcome: str, ongoing: int = 0) -> None:
        """Do nothing."""

    def engines(self) -> dict[str, EngineReplica]:
        return {replica.name: self._engine(replica) for replica in self.replicas} if self._known else {}

    accepting = engines

    def full(self) -> set[str]:
        return set(self.full_replicas)

    @property
    def listed(self) -> bool:
        """A pool whose replicas become known with the first request."""
        return self._known

    def ongoing(self) -> dict[str, int]:
        return {replica.name: 0 for replica in self.replicas} if self._known else {}

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

    @property
    def calls(self) -> list[Call]:
        return [call for replica in self.replicas for call in replica.calls]


def router_of(limits: RouterLimits, *handles: Handle) -> Router:
    """Return the router before both roles' handles."""
    engines: Any = handles
    prefill, decode, *_ = handles
    decode.prefill, prefill.role = prefill, "prefill"
    return Router(limits, ModelEngines(*engines))


async def at_rest(*handles: Handle) -> None:
    """Wait until the router has no slot, call or task left. Raises TimeoutError after 20 s."""
    async with asyncio.timeout(20):
        while True:
            if not any(handle.taken or handle.running for handle in handles) and len(asyncio.all_tasks()) == 1:
                break
            await asyncio.sleep(0.001)
