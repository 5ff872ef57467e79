"""Which engines of a role there are, and which takes the next request: the one that was decided on, else the one with
the fewest ongoing.

`rank` orders them and is pure. What each has announced comes from Serve (`serve_discovery.py`), from which a router
learns nothing else of its engines (docs/decisions/0108).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from actors.rpc.address import RpcAddress


@dataclass(frozen=True)
class EngineReplica:
    """A replica that runs, as it has announced itself."""

    address: RpcAddress
    slots: int
    """Calls that it takes at a time."""
    queue: int
    """Requests that may wait in a router for engines of its role."""
    metadata: Mapping[str, Any]
    """All that it has announced."""


class ReplicaRegistry:
    """A role's running replicas, as Serve knows them in this process. Empty-handed until the first choice is made."""

    def __init__(self) -> None:
        self._look: Callable[[], Mapping[str, int]] | None = None

    def attach(self, look: Callable[[], Mapping[str, int]]) -> None:
        """From now on `look` tells. It is called in other threads than the one that keeps what it tells."""
        self._look = look

    def look(self) -> Mapping[str, int] | None:
        """The ids of the replicas that run, with the requests that Serve takes each to have; None: not known yet."""
        return None if self._look is None else self._look()


def rank(
    ongoing: Mapping[str, int], turn: int, avoid: AbstractSet[str] = frozenset(), prefer: Sequence[str] = ()
) -> list[str]:
    """Replica ids but those to `avoid`, best first: those of `prefer` in its order, then the fewest ongoing requests.

    Who leads equals changes with `turn`.
    """
    ranked = [name for name in prefer if name in ongoing and name not in avoid]
    names_left = sorted(ongoing.keys() - avoid - set(ranked), key=lambda name: (ongoing[name], name))
    for _, equals in groupby(names_left, key=ongoing.__getitem__):
        names = list(equals)
        first = turn % len(names)
        ranked += names[first:] + names[:first]
    return ranked


Replicas = Callable[[], Mapping[str, Mapping[str, Any]]]
"""What each replica that runs has announced, with its `slots`, by replica id."""

_LISTS: dict[Hashable, Replicas] = {}


def register(deployment: Hashable, replicas: Replicas) -> None:
    """From now on `replicas` tells of the deployment with this id."""
    _LISTS[deployment] = replicas


def engines_of(deployment: Hashable) -> dict[str, EngineReplica]:
    """The replicas that run of the deployment with this id, as far as Serve has told this process."""
    known = _LISTS.get(deployment)
    if known is None:
        return {}
    # A replica of a release that has no doors, which is being replaced, is none of ours.
    return {
        name: EngineReplica(RpcAddress(**said["rpc"]), said["slots"], said["queue"], said)
        for name, said in known().items()
        if "rpc" in said
    }
