"""Call a method of all replicas of a deployment at once through Serve, with a timeout."""

import asyncio
import logging
import time
from typing import Any, Protocol

from ray.serve.handle import DeploymentBroadcastResponse

from actors.upstream.ray_private import replica_results

logger = logging.getLogger(__name__)

LOG_EVERY_S = 300.0
"""Minimum interval in seconds between warnings that Serve cannot call the replicas of a role."""

_logged_at: dict[tuple[str, str], float] = {}
"""Monotonic time in seconds of the last warning, by role and method."""


class Role(Protocol):
    """The method of Serve's DeploymentHandle that this module calls."""

    def broadcast(self, method: str, /, *arguments: object) -> DeploymentBroadcastResponse:
        """Call a method of all replicas."""


async def ask_all(role: str, handle: Role, method: str, timeout_s: float, *arguments: object) -> list[Any]:
    """Return the results of `method` on all replicas; log those that fail or time out.

    ``role``  name of the deployment in log messages

    Returns an empty list if Serve cannot call the replicas, or cannot list them in time.
    """
    until = asyncio.get_running_loop().time() + timeout_s
    try:
        async with asyncio.timeout_at(until):
            replicas = await replica_results(handle.broadcast(method, *arguments))
    except Exception as error:  # the caller continues without these replicas
        now = time.monotonic()
        if now - _logged_at.get((role, method), -LOG_EVERY_S) >= LOG_EVERY_S:
            _logged_at[role, method] = now
            logger.warning(
                "%s: cannot call the %s replicas, perhaps because they are starting; continuing without results: %r",
                method,
                role,
                error,
            )
        return []
    replies = await asyncio.gather(*(_reply(replica, until) for replica in replicas), return_exceptions=True)
    for reply in replies:
        if isinstance(reply, TimeoutError):
            logger.warning("%s: a %s replica did not answer within %g s; omitting its result", method, role, timeout_s)
        elif isinstance(reply, BaseException):
            logger.warning("%s: the call failed on a %s replica; omitting its result: %r", method, role, reply)
    return [reply for reply in replies if not isinstance(reply, BaseException)]


async def _reply(replica: Any, until: float) -> Any:
    async with asyncio.timeout_at(until):
        return await replica.get_async()
