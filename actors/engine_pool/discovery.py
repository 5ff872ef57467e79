"""Registry of the running engine replicas, and the order in which a request tries them.

`serve_discovery.py` fills the registry in each router's process from Ray Serve's replica list,
which is the only source (docs/decisions/0036).
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from actors.rpc.address import RpcAddress


@dataclass(frozen=True)
class EngineReplica:
    """A running replica, from its metadata in Serve.

    ``address``   address of its RPC server
    ``slots``     number of sequences that it computes or queues at once
    ``queue``     number of requests that may wait in one router for engines of its role
    ``metadata``  all metadata of the replica
    """

    address: RpcAddress
    slots: int
    queue: int
    metadata: Mapping[str, Any]


def rank(
    ongoing: Mapping[str, int], turn: int, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = ()
) -> list[str]:
    """Return replica ids, best first: those of `prefer` in its order, then those with the fewest
    ongoing requests.

    Excludes the replicas in `avoid`. `turn` rotates equally busy replicas.
    """
    ranked = [name for name in prefer if name in ongoing and name not in avoid]
    names_left = sorted(ongoing.keys() - avoid - set(ranked), key=lambda name: (ongoing[name], name))
    for _, equals in groupby(names_left, key=ongoing.__getitem__):
        names = list(equals)
        first = turn % len(names)
        ranked += names[first:] + names[:first]
    return ranked


_PUBLISHED: dict[Hashable, Mapping[str, EngineReplica]] = {}
_LISTENERS: defaultdict[Hashable, list[Callable[[], None]]] = defaultdict(list)


def publish(deployment: Hashable, metadata: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the replicas of a deployment in the registry; `metadata` is by replica id.

    Excludes replicas of an older release without an RPC server, which Serve is replacing.
    """
    _PUBLISHED[deployment] = {
        name: EngineReplica(RpcAddress(**one["rpc"]), one["slots"], one["queue"], one)
        for name, one in metadata.items()
        if "rpc" in one
    }
    for listener in tuple(_LISTENERS[deployment]):
        listener()


def subscribe(deployment: Hashable, listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` after each change of a deployment's replicas, in Serve's thread.

    Return a function that removes the listener.
    """
    _LISTENERS[deployment].append(listener)
    return lambda: _LISTENERS[deployment].remove(listener)


def replicas_of(deployment: Hashable) -> Mapping[str, EngineReplica] | None:
    """Return a deployment's running replicas by replica id; None before Serve's first report."""
    return _PUBLISHED.get(deployment)
