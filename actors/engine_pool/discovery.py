"""Registry of the engine replicas that run, filled by Ray Serve, and the order in which a request
tries them.

`serve_discovery.py` fills the registry in each router's process. Routers learn about engines in no
other way (docs/decisions/0036).
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
    """A running replica, from the metadata that it gave to Serve."""

    address: RpcAddress
    slots: int
    """Number of calls that it serves at once."""
    queue: int
    """Number of requests that may wait in one router for engines of its role."""
    metadata: Mapping[str, Any]
    """All metadata of the replica."""


def rank(
    ongoing: Mapping[str, int], turn: int, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = ()
) -> list[str]:
    """Return replica ids, best first: those of `prefer` in its order, then those with the fewest
    ongoing requests.

    Replicas in `avoid` are left out. `turn` rotates replicas that are equally busy.
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
    """Replace the running replicas of a deployment by those with this metadata, by replica id.

    Replicas of another release without an RPC server are left out; they are being replaced.
    """
    _PUBLISHED[deployment] = {
        name: EngineReplica(RpcAddress(**one["rpc"]), one["slots"], one["queue"], one)
        for name, one in metadata.items()
        if "rpc" in one
    }
    for listener in tuple(_LISTENERS[deployment]):
        listener()


def subscribe(deployment: Hashable, listener: Callable[[], None]) -> Callable[[], None]:
    """Call `listener` after each change of a deployment's replicas, in Serve's thread; return a
    function that ends this."""
    _LISTENERS[deployment].append(listener)
    return lambda: _LISTENERS[deployment].remove(listener)


def replicas_of(deployment: Hashable) -> Mapping[str, EngineReplica] | None:
    """Return the running replicas of a deployment by replica id; None until Serve has reported them."""
    return _PUBLISHED.get(deployment)
