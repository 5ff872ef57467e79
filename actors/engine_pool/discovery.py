"""Registry of the running engines, and the order in which a router prefers them for a slot.

An engine is a replica, or one of its data-parallel ranks (docs/decisions/0047).
`serve_discovery.py` fills the registry from Ray Serve's replica list, the only source
(docs/decisions/0036).
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from actors.policy.prefixes import EngineStore
from actors.request import ProducerAddress
from actors.rpc.address import RpcAddress
from actors.rpc.messages import PrefillCandidate


@dataclass(frozen=True)
class EngineReplica:
    """A running engine, from the replica's metadata in Serve.

    ``slots``     number of ongoing sequences at which it refuses further calls
    ``queue``     number of requests that may wait in one router for engines of its role
    ``metadata``  from `replica_metadata`, and `producer` of a prefill engine
    ``replica``   id of the replica; its ranks end together
    """

    address: RpcAddress
    slots: int
    queue: int
    metadata: Mapping[str, Any]
    replica: str
    rank: int = 0

    @property
    def store(self) -> EngineStore | None:
        described = self.metadata.get("store")
        return None if described is None else EngineStore(*(described[name] for name in EngineStore._fields))

    def candidate(self, name: str) -> PrefillCandidate:
        return PrefillCandidate(name, self.address, ProducerAddress.from_params(self.metadata["producer"]))

    @property
    def identity(self) -> str:
        """Digest of what engines must share to exchange KV or to continue each other's streams
        (`engine_identity` in `connectors/protocol/agent_metadata.py`).
        """
        return str(self.metadata.get("identity", ""))


def engine_names(replica: str, ranks: int) -> list[str]:
    return [f"{replica}-dp{rank}" for rank in range(ranks)] if ranks > 1 else [replica]


def ranked_metadata(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a replica's metadata for Serve: the first rank's, and all ranks' as `ranks`."""
    return dict(ranks[0]) | ({"ranks": list(ranks)} if len(ranks) > 1 else {})


def rank(
    ongoing: Mapping[str, int], turn: int, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = ()
) -> list[str]:
    """Return the engine ids in `ongoing` that are not in `avoid`, best first: those in `prefer`,
    then those with the fewest ongoing sequences, equal ones rotated by `turn`.
    """
    ranked = [name for name in prefer if name in ongoing and name not in avoid]
    names_left = sorted(ongoing.keys() - avoid - set(ranked), key=lambda name: (ongoing[name], name))
    for _, equals in groupby(names_left, key=ongoing.__getitem__):
        names = list(equals)
        first = turn % len(names)
        ranked += names[first:] + names[:first]
    return ranked


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
        for rank, (name, own) in enumerate(zip(engine_names(replica, len(ranks)), ranks, strict=True)):
            engines[name] = EngineReplica(RpcAddress(**own["rpc"]), own["slots"], own["queue"], own, replica, rank)
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
