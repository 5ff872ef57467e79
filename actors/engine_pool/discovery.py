"""Registry of the engine replicas that run, filled by Ray Serve, and the order in which a request
tries them.

`serve_discovery.py` fills the registry in each router's process. Routers learn about engines in no
other way (docs/decisions/0108).
"""

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


class ReplicaRegistry:
    """Running replicas of one role. Empty until the pool's first request: Serve reports replicas
    only then."""

    def __init__(self) -> None:
        self._look: Callable[[], Mapping[str, int]] | None = None

    def attach(self, look: Callable[[], Mapping[str, int]]) -> None:
        """Set the source of the replica list. Other threads call `look` than the one that updates
        the list."""
        self._look = look

    def look(self) -> Mapping[str, int] | None:
        """Return the ongoing requests of each running replica, by replica id; None while the list
        is unknown."""
        return None if self._look is None else self._look()


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


Replicas = Callable[[], Mapping[str, Mapping[str, Any]]]
"""Metadata of each running replica, with its `slots`, by replica id."""

_LISTS: dict[Hashable, Replicas] = {}


def register(deployment: Hashable, replicas: Replicas) -> None:
    """Set the source of the replicas of one deployment."""
    _LISTS[deployment] = replicas


def engines_of(deployment: Hashable) -> dict[str, EngineReplica]:
    """Return the running replicas of one deployment by replica id, as far as Serve has told this
    process."""
    known = _LISTS.get(deployment)
    if known is None:
        return {}
    # Skip replicas of another release without an RPC server; they are being replaced.
    return {
        name: EngineReplica(RpcAddress(**said["rpc"]), said["slots"], said["queue"], said)
        for name, said in known().items()
        if "rpc" in said
    }
