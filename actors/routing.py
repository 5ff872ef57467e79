"""Which replica takes the next request: the one with the fewest ongoing, in turn among equals.

`rank` decides and is pure; `LeastOngoing` carries it out inside Serve's handles.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica


def rank(ongoing: Mapping[str, int], turn: int) -> list[str]:
    """Replica ids, best first: fewest ongoing requests; among equals, who goes first changes with `turn`."""
    ranked: list[str] = []
    for _, equals in groupby(sorted(ongoing, key=lambda name: (ongoing[name], name)), key=ongoing.__getitem__):
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
        """All candidates, one to a rank, so that Serve tries them in this order."""
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        ongoing = {name: lengths.get(replica.replica_id) or 0 for name, replica in by_id.items()}
        self._turn += 1
        return [[by_id[name]] for name in rank(ongoing, self._turn)]
