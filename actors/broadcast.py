"""Call a method of all replicas of a deployment at once through Serve, with a timeout."""

import asyncio
import logging
import time
from typing import Any, Protocol

from ray.serve.handle import DeploymentBroadcastResponse

from actors.upstream.ray_private import replica_results

logger = logging.getLogger(__name__)

LOG_EVERY_S = 30.0
"""Minimum interval in seconds between warnings that Serve cannot call a role's replicas.

Applies to each method of a role. Serve cannot call replicas that are still starting.
"""

_logged_at: dict[tuple[str, str], float] = {}
"""Monotonic time in seconds of the last warning (LOG_EVERY_S), by role and method."""


class Role(Protocol):
    """The method of Serve's DeploymentHandle that this module calls."""

    def broadcast(self, method: str, /, *arguments: object) -> DeploymentBroadcastResponse:
        """Call a method of all replicas."""


async def ask_all(role: str, handle: Role, method: str, timeout_s: float, *arguments: object) -> list[Any]:
    """Return the results of `method` on all replicas, without those that fail or time out.

    ``role``  name of the deployment in log messages

    Returns an empty list if Serve cannot call the replicas, or cannot list them in time.
    """
    try:
        return await replies_of(role, method, handle.broadcast(method, *arguments), timeout_s)
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


async def replies_of(role: str, method: str, asked: DeploymentBroadcastResponse, timeout_s: float) -> list[Any]:
    """Return the results that arrive within `timeout_s`; log replicas that fail or time out.

    Raises Serve's error if no replica can be called, TimeoutError if Serve does not list the
    replicas within `timeout_s`.
    """
    until = asyncio.get_running_loop().time() + timeout_s
    async with asyncio.timeout_at(until):
        replicas = await replica_results(asked)
    waiting = (_reply(replica, until) for replica in replicas)
    replies = await asyncio.gather(*waiting, return_exceptions=True)
    for reply in replies:
        if isinstance(reply, TimeoutError):
            logger.warning("%s: a %s replica did not answer within %g s; omitting its result", method, role, timeout_s)
        elif isinstance(reply, BaseException):
            logger.warning("%s: the call failed on a %s replica; omitting its result: %r", method, role, reply)
    return [reply for reply in replies if not isinstance(reply, BaseException)]


async def _reply(replica: Any, until: float) -> Any:
    async with asyncio.timeout_at(until):
        return await replica.get_async()
