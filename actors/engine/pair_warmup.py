"""Warm-up of engine pairs: the first handshake and transfer use a probe of a few tokens.

Before Serve marks a new replica ready, each of its ranks exchanges a probe with each rank of each
running replica of the other role. Two replicas that start together do not find each other, so
decode also looks for new prefill replicas. Without it, a pair's first request waits for the
handshake.
"""

import asyncio
import logging
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from actors.broadcast import ask_all
from actors.engine_pool.engines import replicas_of
from actors.engine_pool.slots import EngineReplica
from configs.settings.base import RoleName
from configs.settings.kv import TransferSettings

logger = logging.getLogger(__name__)

ProbeParams = Mapping[str, Any]
"""`kv_transfer_params` with which a decode engine fetches the KV of a probe."""

FETCH_MARGIN_S = 10.0
"""Seconds that a probe may take beyond the handshake: prompt, transfer, recomputation."""

CALL_MARGIN_S = 5.0
"""Seconds that Serve may take to call a replica, beyond the method's own time."""

WARM_UP_INTERVAL_S = 5.0


def probe_timeout_s(transfer: TransferSettings) -> float:
    """Return a probe's timeout, above a handshake's, which first reports its reason."""
    return transfer.handshake_s + FETCH_MARGIN_S


def model_suffix(deployment: str) -> str:
    """Return the part of an engine deployment's name that names its model; "" without `models`."""
    return deployment.removeprefix("Prefill").removeprefix("Decode")


def peer_deployment(role: RoleName) -> str:
    return role.capitalize() + model_suffix(serve.get_replica_context().deployment)


class PeerReplicas:
    """All replicas of a role of this process's model. A call takes at most `timeout_s` seconds."""

    def __init__(self, role: RoleName, probe_timeout_s: float) -> None:
        self.role = role
        self.timeout_s = probe_timeout_s + CALL_MARGIN_S

    @cached_property
    def _handle(self) -> DeploymentHandle:
        # A plain handle follows no list before its first call.
        return serve.get_deployment_handle(peer_deployment(self.role), _check_exists=False).options()

    def engines(self) -> Mapping[str, EngineReplica]:
        """Return the engines that Serve lists. The first call blocks, and then follows the list."""
        return replicas_of(self._handle.deployment_id)

    def broadcast(self, method: str, /, *arguments: object) -> DeploymentBroadcastResponse:
        return self._handle.broadcast(method, *arguments)

    async def ask(self, method: str, *arguments: object) -> list[Any]:
        return await ask_all(self.role, self, method, self.timeout_s, *arguments)


async def every(seconds: float, work: Any) -> None:
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:
            logger.exception("a periodic task of this replica failed; trying again after its interval")
