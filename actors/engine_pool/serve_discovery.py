"""Serve's word of the engines that run, brought to the process of a router.

Serve makes the class anew in each process, out of a copy of this module: what is to be found again is in another one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, PendingRequest, RequestRouter, RunningReplica

from actors.engine_pool import discovery


class DiscoveryRouter(FIFOMixin, RequestRouter):
    """Serve's request router for engine replicas: any will do for what goes through Serve's handles."""

    def initialize_state(self) -> None:
        """Serve's hook, when a handle's updates begin."""
        discovery.register(self._deployment_id, self._said)

    async def choose_replicas(
        self, candidate_replicas: Sequence[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Serve's hook."""
        return [list(candidate_replicas)]

    def _said(self) -> dict[str, Mapping[str, Any]]:
        # Serve may keep it in a thread of its own.
        replicas = list(self.curr_replicas.items())
        return {
            name.unique_id: {**replica.replica_metadata, "slots": replica.max_ongoing_requests}
            for name, replica in replicas
        }
