"""A router's pool of the engines of one role: takes slots and sends calls to RPC servers.

Serve starts and stops replicas; calls do not pass through it (docs/decisions/0036).
`serve_discovery.py` copies Serve's list of replicas to the registry here, its only source.
"""

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.engine_pool.engine_call import EngineCall, Watcher
from actors.engine_pool.slots import ANY, EngineReplica, Slot, SlotPool, SlotRequest
from actors.errors import DeadlineError, EngineDownError, EngineError
from actors.policy.admission import KvCache
from actors.policy.prefixes import EngineStore
from actors.request import Call, PrefillReport
from actors.rpc.address import RpcAddress
from actors.rpc.client import Channels
from actors.rpc.messages import KEEP, PrefillCandidate, PrefillOrder, RpcRequest
from actors.tls import ReloadedTls
from configs.settings.base import RoleName

logger = logging.getLogger(__name__)


def engine_names(replica: str, ranks: int) -> list[str]:
    return [f"{replica}-dp{rank}" for rank in range(ranks)] if ranks > 1 else [replica]


def ranked_metadata(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a replica's metadata for Serve: the first rank's, and all ranks' as `ranks`."""
    return dict(ranks[0]) | ({"ranks": list(ranks)} if len(ranks) > 1 else {})


_PUBLISHED: dict[Hashable, Mapping[str, EngineReplica]] = {}
_LAST: dict[Hashable, Mapping[str, EngineReplica]] = {}
_LISTENERS: defaultdict[Hashable, list[Callable[[], None]]] = defaultdict(list)


def publish(deployment: Hashable, metadata: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the engines of a deployment, by replica id, then call its listeners.

    Excludes replicas of an older release without an RPC server, which Serve is replacing.
    """
    engines: dict[str, EngineReplica] = {}
    for replica, one in metadata.items():
        if "rpc" not in one:
            continue
        ranks = one.get("ranks", [one])
        drained = bool(one.get("drained"))
        for rank, (name, own) in enumerate(zip(engine_names(replica, len(ranks)), ranks, strict=True)):
            address = RpcAddress(**own["rpc"])
            engines[name] = EngineReplica(address, own["slots"], own["queue"], own, replica, rank, drained)
    _PUBLISHED[deployment] = engines
    if engines:
        _LAST[deployment] = engines
    for listener in tuple(_LISTENERS[deployment]):
        listener()


def subscribe(deployment: Hashable, listener: Callable[[], None]) -> Callable[[], None]:
    """Let `publish` call `listener` in Serve's thread; return a function that removes it."""
    _LISTENERS[deployment].append(listener)
    return lambda: _LISTENERS[deployment].remove(listener)


def replicas_of(deployment: Hashable) -> Mapping[str, EngineReplica] | None:
    """Return a deployment's running engines by id; None before Serve's first report."""
    return _PUBLISHED.get(deployment)


def last_replicas_of(deployment: Hashable) -> Mapping[str, EngineReplica]:
    """Return the engines in Serve's last list that had any; they may have stopped."""
    return _LAST.get(deployment, {})


class EnginePool:
    """The engines of one role."""

    def __init__(self, role: RoleName, handle: DeploymentHandle, tls: ReloadedTls | None = None) -> None:
        self._role = role
        # A handle with options receives Serve's updates of replicas at once, a plain handle only
        # after its first call.
        self._handle = handle.options()
        self._slots = SlotPool(self._engines)
        self._router = uuid.uuid4().hex
        self._channels = Channels(tls)
        self._stores: dict[str, EngineStore] = {}
        self._kv_caches: dict[str, KvCache] = {}
        self._identities: dict[str, str] = {}
        self._frontends: dict[str, str] = {}
        self._known: Mapping[str, EngineReplica] = {}
        self._unsubscribe: Callable[[], None] | None = None
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self.leaving = False

    def leave(self) -> None:
        """Keep the engines until this stopping router closes its connections.

        It still receives requests. Serve may stop the engines at the same time and list none.
        Engines are released once Serve lists others instead.
        """
        self.leaving = True
        self._follow_replicas()
        self._keeping = {
            name: asyncio.create_task(self._keep(name, one.address), name="keeps-an-engine")
            for name, one in self._engines().items()
        }
        self._slots.changed()

    async def _keep(self, name: str, address: RpcAddress) -> None:
        try:
            await self._ask(address, KEEP, ())
        except EngineError:
            return  # an engine of an earlier release
        except EngineDownError:
            if name in (replicas_of(self._handle.deployment_id) or {}):
                return
        self._slots.record_leaving(name)

    def _engines(self) -> Mapping[str, EngineReplica]:
        """Return Serve's list; a stopping router also uses the last one that had engines."""
        running = replicas_of(self._handle.deployment_id) or {}
        return running if running or not self.leaving else last_replicas_of(self._handle.deployment_id)

    async def take(self, wanted: SlotRequest = ANY) -> Slot:
        """Take slots as `SlotPool.take` does."""
        self._follow_replicas()
        while True:
            slot = self._slot(await self._slots.take(wanted), wanted)
            if slot is not None:
                return slot

    def take_now(self, wanted: SlotRequest) -> Slot | None:
        self._follow_replicas()
        name = self._slots.take_now(wanted)
        return None if name is None else self._slot(name, wanted)

    def _follow_replicas(self) -> None:
        if self._unsubscribe is None:
            self._unsubscribe = subscribe(
                self._handle.deployment_id, partial(_call, self._changed, asyncio.get_running_loop())
            )

    def _changed(self) -> None:
        self._slots.changed()
        for name in self._keeping.keys() - self._engines().keys():
            self._keeping.pop(name).cancel()

    def _slot(self, name: str, wanted: SlotRequest) -> Slot | None:
        """Return the taken slots of engine `name`; give them back if it has stopped."""
        try:
            engine = self._engines().get(name)
            if engine is not None:
                return Slot(name, engine, wanted.sequences, self._slots.maybe_full(name), tokens=wanted.tokens)
        except BaseException:
            self._slots.give_back(name, wanted.sequences, False, wanted.tokens)
            raise
        self._slots.give_back(name, wanted.sequences, False, wanted.tokens)
        return None

    def give_back(self, slot: Slot) -> None:
        self._slots.give_back(slot.replica_id, slot.sequences, slot.served, slot.tokens)

    def move(self, slot: Slot, name: str) -> None:
        """Move the slots of `slot` to engine `name`, which decode calls in place of the other one.

        The engine may then have more sequences than slots: it refuses the call if it is full.
        """
        self.give_back(slot)
        self._slots.add(name, slot.sequences, slot.tokens)
        slot.replica_id, slot.served = name, False

    def record(self, slot: Slot, report: PrefillReport) -> None:
        """Record what the engine of `slot` answered to decode's call."""
        match report.outcome:
            case "accepted":
                slot.served = True
                self._slots.record_accepted(slot.replica_id, report.ongoing)
            case "full":
                self._slots.record_full(slot.replica_id)
            case "leaving":
                self._slots.record_leaving(slot.replica_id)

    def candidate(self, name: str) -> PrefillCandidate | None:
        engine = self._engines().get(name)
        return None if engine is None else PrefillCandidate(name, engine.address, engine.producer)

    @property
    def caller(self) -> tuple[str, int]:
        """Id of this pool, and number of requests that wait for its slots (`RpcRequest`)."""
        return self._router, self._slots.waiting

    def dispatch(
        self, slot: Slot, call: Call, watcher: Watcher | None = None, prefill: PrefillOrder | None = None
    ) -> EngineCall:
        request = RpcRequest(call, *self.caller, maybe_full=slot.maybe_full, prefill=prefill)
        running = EngineCall(self._role, slot, self._slots, watcher)
        running.send(self._channels.to(slot.engine.address), request)
        return running

    def ongoing(self) -> Mapping[str, int] | None:
        """Return the ongoing sequences by engine that accepts calls; None before Serve's first
        report.
        """
        return None if replicas_of(self._handle.deployment_id) is None else self._slots.ongoing()

    def stores(self) -> dict[str, EngineStore]:
        self._read_metadata()
        return self._stores

    def kv_caches(self) -> dict[str, KvCache]:
        self._read_metadata()
        return self._kv_caches

    def identities(self) -> dict[str, str]:
        self._read_metadata()
        return self._identities

    def frontends(self) -> dict[str, str]:
        self._read_metadata()
        return self._frontends

    def full(self) -> set[str]:
        """Return the engines on which no slot can be taken now."""
        return self._slots.full()

    def accepting(self) -> set[str]:
        """Return the identities of the engines that accept calls."""
        identities = self.identities()
        return {identities[name] for name in self._slots.ongoing() if name in identities}

    def _read_metadata(self) -> None:
        engines = self._engines()
        if engines is not self._known:  # each decision asks
            self._known = engines
            stores = {name: one.store for name, one in engines.items()}
            self._stores = {name: store for name, store in stores.items() if store is not None}
            caches = {name: one.kv_cache for name, one in engines.items()}
            self._kv_caches = {name: cache for name, cache in caches.items() if cache is not None}
            self._identities = {name: one.identity for name, one in engines.items()}
            self._frontends = {name: one.frontend for name, one in engines.items()}

    def same_replica(self, name: str) -> frozenset[str]:
        """Return the ids of the ranks in the replica of engine `name`, `name` included."""
        engines = self._engines()
        if name not in engines:
            return frozenset({name})
        return frozenset(other for other, one in engines.items() if one.replica == engines[name].replica)

    @property
    def replica_count(self) -> int:
        engines, accepting = replicas_of(self._handle.deployment_id) or {}, self._slots.ongoing()
        return len({one.replica for name, one in engines.items() if name in accepting})

    def has_engines(self, avoid: AbstractSet[str] = frozenset(), identity: str | None = None) -> bool:
        identities = self.identities()
        usable = self._slots.ongoing().keys() - avoid
        return any(identity is None or identities.get(name) == identity for name in usable)

    @property
    def slots(self) -> int:
        return sum(engine.slots for engine in self._engines().values())

    @property
    def slots_taken(self) -> int:
        return self._slots.taken

    async def ask_all(self, method: str, timeout_s: float) -> list[Any]:
        """Return the results of a method of all replicas; log those that fail or time out."""
        replies = await self.tell_all(method, timeout_s)
        for name, reply in replies.items():
            if isinstance(reply, Exception):
                logger.warning("method %s of replica %s failed, so its result is omitted: %r", method, name, reply)
        return [reply for reply in replies.values() if not isinstance(reply, Exception)]

    async def tell_all(
        self, method: str, timeout_s: float, *arguments: object, only: str | None = None
    ) -> dict[str, Any]:
        """Return the result or the exception of a method of each replica, by id of its first rank,
        which answers for all ranks. DeadlineError: no answer within `timeout_s`.

        ``only``  id of the one replica to call; None: all
        """
        engines = replicas_of(self._handle.deployment_id) or {}
        replicas = {name: one for name, one in engines.items() if one.rank == 0 and only in (None, name)}
        asked = [asyncio.create_task(self._ask(one.address, method, arguments)) for one in replicas.values()]
        if not asked:
            return {}
        done, late = await asyncio.wait(asked, timeout=timeout_s)
        for task in late:
            task.cancel()
        return {
            name: DeadlineError(f"no answer within {timeout_s:g} s")
            if task not in done
            else task.exception() or task.result()
            for name, task in zip(replicas, asked, strict=True)
        }

    async def _ask(self, address: RpcAddress, method: str, arguments: Sequence[object]) -> Any:
        # The connection is chosen when the task runs: one chosen earlier may have closed meanwhile.
        return await self._channels.to(address).ask(method, *arguments)

    async def close(self) -> None:
        self._channels.close()
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None


def _call(do: Callable[[], None], loop: asyncio.AbstractEventLoop) -> None:
    """Run `do` in `loop` from any thread, unless the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(do)
