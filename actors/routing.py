"""Which replica takes the next request: the one with the fewest ongoing, in turn among equals.

`rank` decides and is pure; `LeastOngoing` carries it out inside Serve's handles.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


def rank(ongoing: Mapping[str, int], turn: int, avoid: AbstractSet[str] = frozenset()) -> list[str]:
    """Replica ids but those to `avoid`, best first: fewest ongoing requests; who leads equals changes with `turn`."""
    ranked: list[str] = []
    names_left = sorted(ongoing.keys() - avoid, key=lambda name: (ongoing[name], name))
    for _, equals in groupby(names_left, key=ongoing.__getitem__):
        names = list(equals)
        first = turn % len(names)
        ranked += names[first:] + names[:first]
    return ranked


class LeastOngoing(FIFOMixin, RequestRouter):
    """Serve's request router for engine replicas, first come first served."""

    def initialize_state(self) -> None:
        self._turn = 0

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The candidates that the request does not avoid, one to a rank, so that Serve tries them in this order."""
        avoid: AbstractSet[str] = frozenset()
        if pending_request is not None:
            avoid = pending_request.kwargs.get("avoid", avoid)
            # Or Serve asks again at once, and again, while every replica is full.
            pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        ongoing = {name: lengths.get(replica.replica_id) or 0 for name, replica in by_id.items()}
        self._turn += 1
        return [[by_id[name]] for name in rank(ongoing, self._turn, avoid)]
