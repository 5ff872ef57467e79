"""Which replica takes the next request: the one that was decided on, else the one with the fewest ongoing.

`rank` orders replicas and is pure; `LeastOngoing` carries it out inside Serve's handles, and shows through a `Roster`
which replicas there are.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


class Roster:
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


class LeastOngoing(FIFOMixin, RequestRouter):
    """Serve's request router for engine replicas. Who waits for any place is served first come first served."""

    def initialize_state(self) -> None:
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates that the request does not avoid, one to a rank, so that Serve tries them in this order."""
        avoid: AbstractSet[str] = frozenset()
        prefer: Sequence[str] = ()
        if pending_request is not None:
            avoid = pending_request.kwargs.get("avoid", avoid)
            prefer = pending_request.kwargs.get("prefer", prefer)
            if roster := pending_request.kwargs.get("roster"):
                roster.attach(self._ongoing)
            # Or Serve asks again at once, and again, while every replica is full.
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._turn += 1
        return [[by_id[name]] for name in rank(self._ongoing(), self._turn, avoid, prefer) if name in by_id]

    def _ongoing(self) -> dict[str, int]:
        lengths = self.replica_queue_len_cache
        return {name.unique_id: lengths.get(name) or 0 for name in list(self.curr_replicas)}
