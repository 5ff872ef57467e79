"""Serve's list of running engine replicas, brought into the process of a router.

Serve pickles this module by value, so the registry lives in `discovery.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from actors.engine_pool import discovery


class DiscoveryRouter(FIFOMixin, RequestRouter):
    """Serve's request router for engine replicas. Requests bypass it; it only registers the replica
    list."""

    def initialize_state(self) -> None:
        """Register the replica list; Serve calls this when a handle starts to receive updates."""
        discovery.register(self._deployment_id, self._said)

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all candidates; Serve's hook for calls through a handle."""
        return [list(candidate_replicas)]

    def _said(self) -> dict[str, Mapping[str, Any]]:
        # Serve may update the replicas in another thread.
        replicas = list(self.curr_replicas.items())
        return {
            name.unique_id: {**replica.replica_metadata, "slots": replica.max_ongoing_requests}
            for name, replica in replicas
        }
