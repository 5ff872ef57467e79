"""Copy Serve's list of running engine replicas to the registry in a router's process.

Serve pickles this module by value, so the registry lives in `engines.py`.
"""

from collections.abc import Sequence

from ray.serve.request_router import FIFOMixin, PendingRequest, ReplicaID, RequestRouter, RunningReplica

from actors.engine_pool import engines


class DiscoveryRouter(FIFOMixin, RequestRouter):
    """Serve's request router of the engine deployments; publishes their replicas.

    Tandem's routers send requests to the engines directly, not through this class.
    """

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's hook for changes of the replica list or of the replicas' metadata."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve's hook for the death of a replica's actor, before the controller's update."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all candidates, as one group; Serve's hook for a call through a handle."""
        return [list(candidate_replicas)]

    def _publish(self) -> None:
        metadata = {
            name.unique_id: {"slots": replica.max_ongoing_requests, **replica.replica_metadata, **replica.routing_stats}
            for name, replica in self.curr_replicas.items()
        }
        engines.publish(self._deployment_id, metadata)
