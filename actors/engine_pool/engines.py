"""A router's pool of the engines of one role: takes slots and sends calls to RPC servers.

Serve starts and stops replicas; calls do not pass through it (docs/decisions/0036).
`serve_discovery.py` copies Serve's list of replicas to the registry here, its only source.
"""

import asyncio
import uuid
from collections.abc import Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from ray.serve.handle import DeploymentHandle

from actors.engine_pool.engine_call import EngineCall, Watcher
from actors.engine_pool.slots import EngineReplica, Slot, SlotPool
from actors.errors import DeadlineError, EngineDownError, EngineError
from actors.request import Call
from actors.rpc.address import RpcAddress
from actors.rpc.client import Channels
from actors.rpc.messages import KEEP, PrefillOrder, RpcRequest
from actors.tls import ReloadedTls
from configs.settings.base import RoleName

KEEP_POLL_S = 0.5
"""Seconds between a stopping router's checks whether it must still keep an engine."""


def engine_names(replica: str, ranks: int) -> list[str]:
    return [f"{replica}-dp{rank}" for rank in range(ranks)] if ranks > 1 else [replica]


def ranked_metadata(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a replica's metadata for Serve: the first rank's, and all ranks' as `ranks`."""
    return dict(ranks[0]) | ({"ranks": list(ranks)} if len(ranks) > 1 else {})


_PUBLISHED: dict[Hashable, Mapping[str, EngineReplica]] = {}
_LAST: dict[Hashable, Mapping[str, EngineReplica]] = {}


def publish(deployment: Hashable, metadata: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the engines of a deployment, by replica id. Called in Serve's thread.

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


def replicas_of(deployment: Hashable) -> Mapping[str, EngineReplica]:
    """Return a deployment's running engines by id."""
    return _PUBLISHED.get(deployment, {})


def last_replicas_of(deployment: Hashable) -> Mapping[str, EngineReplica]:
    """Return the engines in Serve's last list that had any; they may have stopped."""
    return _LAST.get(deployment, {})


class EnginePool(SlotPool):
    """The engines of one role, and this router's slots on them and connections to them."""

    def __init__(self, role: RoleName, handle: DeploymentHandle, tls: ReloadedTls | None = None) -> None:
        super().__init__(self.engines)
        self.role = role
        # A handle with options receives Serve's updates of replicas at once, a plain handle only
        # after its first call.
        self._handle = handle.options()
        self._deployment = self._handle.deployment_id
        self._router = uuid.uuid4().hex
        self._channels = Channels(tls)
        self._keeping: list[asyncio.Task[None]] = []
        self.stopping = False

    def leave(self) -> None:
        """Keep the engines until this stopping router closes its connections.

        It still receives requests. Serve may stop the engines at the same time and list none.
        Engines are released once Serve lists others instead.
        """
        self.stopping = True
        self._keeping = [
            asyncio.create_task(self._keep(name, one.address), name="keeps-an-engine")
            for name, one in self.engines().items()
        ]

    async def _keep(self, name: str, address: RpcAddress) -> None:
        asking = asyncio.create_task(self._ask(address, KEEP, ()), name="asks-to-keep-an-engine")
        try:
            while not (await asyncio.wait({asking}, timeout=KEEP_POLL_S))[0]:
                if name not in self.engines():
                    return
            asking.result()
        except EngineError:
            return  # an engine of an earlier release
        except EngineDownError:
            if name in replicas_of(self._deployment):
                return
        finally:
            asking.cancel()
        self._leaving.add(name)

    def engines(self) -> Mapping[str, EngineReplica]:
        """Return Serve's list; a stopping router also uses the last one that had engines."""
        running = replicas_of(self._deployment)
        return running if running or not self.stopping else last_replicas_of(self._deployment)

    @property
    def caller(self) -> tuple[str, int]:
        """Id of this pool, and number of requests that wait for its slots (`RpcRequest`)."""
        return self._router, self.waiting

    def dispatch(
        self, slot: Slot, call: Call, watcher: Watcher | None = None, prefill: PrefillOrder | None = None
    ) -> EngineCall:
        request = RpcRequest(call, *self.caller, maybe_full=slot.maybe_full, prefill=prefill)
        running = EngineCall(self.role, slot, self, watcher)
        running.send(self._channels.to(slot.engine.address), request)
        return running

    @property
    def listed(self) -> bool:
        """True once Serve has reported the role's engines, or that there are none."""
        return self._deployment in _PUBLISHED

    def same_replica(self, name: str) -> frozenset[str]:
        """Return the ids of the ranks in the replica of engine `name`, `name` included."""
        engines = self.engines()
        if name not in engines:
            return frozenset({name})
        return frozenset(other for other, one in engines.items() if one.replica == engines[name].replica)

    @property
    def replica_count(self) -> int:
        listed = replicas_of(self._deployment)
        return len({one.replica for name, one in self.accepting().items() if name in listed})

    def has_engines(self, avoid: AbstractSet[str] = frozenset(), identity: str | None = None) -> bool:
        usable = (one for name, one in self.accepting().items() if name not in avoid)
        return any(identity in (None, one.identity) for one in usable)

    @property
    def slots(self) -> int:
        return sum(engine.slots for engine in self.engines().values())

    async def tell_all(
        self, method: str, timeout_s: float, *arguments: object, only: str | None = None
    ) -> dict[str, Any]:
        """Return the result or the exception of a method of each replica, by id of its first rank,
        which answers for all ranks. DeadlineError: no answer within `timeout_s`.

        ``only``  id of the one replica to call; None: all
        """
        engines = replicas_of(self._deployment)
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
