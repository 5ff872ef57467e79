"""Metrics and status of all router replicas; each replica can collect them from its peers."""

import asyncio
import time
from collections import Counter
from itertools import islice
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.broadcast import ask_all
from actors.router.router import Router
from actors.router.single_flight import SingleFlight
from actors.telemetry.router_metrics import RouterMetrics, newest_of

STATUS_AGE_S = 1.0
"""Time in seconds for which a router reuses a status after it has collected the parts.

Limits the load on engines if many status pages are open.
"""

RECENT_SHOWN = 60
"""Maximum number of recent requests in a status."""

RouterMetricsText = tuple[str, str]
"""Replica id and Prometheus exposition of one router replica."""


class RouterReplica(Router):
    """A router that queries its peers.

    Peers call `own_metrics` and `own_status` through the deployment's handle.
    """

    _peers: DeploymentHandle | None = None
    _status: SingleFlight[dict[str, Any]] | None = None

    def find_peers(self) -> None:
        """Get and initialize the handle of the peers, at this replica's start.

        Both wait for Serve's controller and the Ray head, and block the event loop meanwhile.
        """
        replica = serve.get_replica_context()
        # `options` initializes the handle; a plain handle would do it in its first call.
        self._peers = serve.get_deployment_handle(replica.deployment, replica.app_name).options()

    async def own_metrics(self) -> RouterMetricsText:
        """Return this replica's id and Prometheus exposition."""
        return own_replica_id(), "".join(metrics.exposition() for metrics in self._all_metrics())

    async def own_status(self) -> dict[str, Any]:
        """Return this replica's part of the status."""
        counts = Counter[str]()
        for metrics in self._all_metrics():
            counts.update(metrics.counts())
        return {
            "replica": own_replica_id(),
            "ongoing": self.ongoing_sequences,
            "slots_taken": self.slots_taken,
            "limit": self.max_sequences,
            "rejected_config": self.rejected_config,
            "degraded": self.degraded,
            "counts": dict(counts),
            "recent": [one.describe() for one in islice(reversed(self.recent), RECENT_SHOWN)],
        }

    def _all_metrics(self) -> list[RouterMetrics]:
        # Without names, the only model uses the router's metrics.
        return [self.metrics, *(model.metrics for model in self.models if model.names)]

    async def router_metrics(self) -> list[RouterMetricsText]:
        """Return (replica id, exposition) of this replica and of its peers, sorted.

        Omits peers that do not answer within `metrics_timeout_s`.
        """
        own = await self.own_metrics()
        others = dict(await self._ask_peers("own_metrics")) | dict([own])
        return sorted(others.items())

    async def status(self) -> dict[str, Any]:
        """Return the status of the whole service, collected at most STATUS_AGE_S seconds ago.

        Omits engines and routers that do not answer within `metrics_timeout_s`.
        """
        if self._status is None:
            self._status = SingleFlight(self._ask_for_status, STATUS_AGE_S)
        return await self._status()

    async def _ask_for_status(self) -> dict[str, Any]:
        own, engines, peers = await asyncio.gather(
            self.own_status(), self.engine_status(), self._ask_peers("own_status")
        )
        routers = {status["replica"]: status for status in (*peers, own)}
        recent = newest_of((status.pop("recent") for status in routers.values()), RECENT_SHOWN)
        return {
            "at": time.time(),
            "routers": [status for _, status in sorted(routers.items())],
            "engines": sorted(engines, key=lambda engine: (engine["role"] != "prefill", engine["replica"])),
            "recent": recent,
        }

    async def _ask_peers(self, method: str) -> list[Any]:
        if self._peers is None:
            return []
        return await ask_all("router", self._peers, method, self.limits.metrics_timeout_s)


def in_replica() -> bool:
    """Return whether this process is a Serve replica. A driver or test is not, connected or not."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


def own_replica_id() -> str:
    """Return the id of the Serve replica in this process."""
    return serve.get_replica_context().replica_id.unique_id
