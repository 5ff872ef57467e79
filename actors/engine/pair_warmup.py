"""Pairs of engines meet before they get traffic: first contact and first write happen on a probe of a few tokens.

A new prefill replica meets the decode replicas that run before Serve calls it ready, and a new decode replica the
prefill replicas. Where both start at once neither finds the other; decode then looks around every `LOOK_EVERY_S`.
A pair that does not meet meets at its first request, which waits for it.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from actors.broadcast import replies_of
from configs.settings import RoleName, TransferSettings

logger = logging.getLogger(__name__)

ProbeParams = Mapping[str, Any]
"""`kv_transfer_params` with which a decode engine fetches a probe's KV."""

FETCH_MARGIN_S = 10.0
"""For what a probe costs beside its handshake: its prompt, its KV, or the prompt again where no KV comes."""

ASK_MARGIN_S = 5.0
"""For Serve's calls between replicas."""

LOOK_EVERY_S = 5.0
"""Between two looks of a decode replica for prefill replicas that it has not met."""


def meet_s(transfer: TransferSettings) -> float:
    """How long one probe may take: a handshake that fails says why before this ends."""
    return transfer.handshake_s + FETCH_MARGIN_S


class PeerReplicas:
    """The replicas of the other role, asked all at once; each may take `meet_s` for its answer."""

    def __init__(self, role: RoleName, meet_s: float, handle: DeploymentHandle | None = None) -> None:
        """`handle` is the role's; without one, Serve is asked for it when it is needed first."""
        self.role = role
        self.ask_s = meet_s + ASK_MARGIN_S
        self._handle = handle

    async def ask(self, method: str, *arguments: object) -> list[Any]:
        """The answers of the replicas that run and answer in time; none where there is no replica yet."""
        try:
            if self._handle is None:
                self._handle = serve.get_deployment_handle(self.role.capitalize(), _check_exists=False)
            return await replies_of(self.role, method, self._handle.broadcast(method, *arguments), self.ask_s)
        except (RayError, RayServeException, TimeoutError) as error:
            logger.debug("nobody met: %r", error)
        except Exception as error:  # engines that have not met serve nevertheless
            logger.warning("no %s replica can be asked to %s: %r", self.role, method, error)
        return []


async def every(seconds: float, work: Any) -> None:
    """Call the coroutine function `work` for ever; what it raises is logged and does not end it."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:
            logger.exception("looking for new replicas failed")
