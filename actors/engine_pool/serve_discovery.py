"""Serve's list of running engine replicas, brought into the process of a router.

Serve pickles this module by value, so the registry lives in `discovery.py`.
"""

from collections.abc import Sequence

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from actors.engine_pool import discovery


class DiscoveryRouter(FIFOMixin, RequestRouter):
    """Serve's request router for engine replicas. Requests bypass it; it only publishes the replica
    list."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Publish the running replicas; Serve calls this when they or their metadata change."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Publish the remaining replicas; Serve calls this before its controller has noticed."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all candidates; Serve's hook for calls through a handle."""
        return [list(candidate_replicas)]

    def _publish(self) -> None:
        metadata = {
            name.unique_id: {"slots": replica.max_ongoing_requests, **replica.replica_metadata}
            for name, replica in self.curr_replicas.items()
        }
        discovery.publish(self._deployment_id, metadata)
