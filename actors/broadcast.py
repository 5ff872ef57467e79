"""What a role's replicas answer to a question that goes to all of them, each waited for on its own."""

import asyncio
import logging
import time
from typing import Any, Protocol

from ray.serve.handle import DeploymentBroadcastResponse

from actors.upstream.ray_private import replica_results

logger = logging.getLogger(__name__)

LOG_EVERY_S = 30.0
"""`/health` is asked every second or so while the engines start, and fails each time for the same reason."""

_logged_at: dict[tuple[str, str], float] = {}
"""By role and method; there are a handful of each."""


class Role(Protocol):
    """Whose replicas can all be asked: Serve's handle, or `actors.engine_pool.engines.Engines`."""

    def broadcast(self, method: str, /, *arguments: object) -> DeploymentBroadcastResponse:
        """Call a method of all replicas."""


async def ask_all(role: str, handle: Role, method: str, timeout_s: float, *arguments: object) -> list[Any]:
    """What the replicas behind `handle` return from `method`; those that fail or are late are left out."""
    try:
        return await replies_of(role, method, handle.broadcast(method, *arguments), timeout_s)
    except Exception as error:  # the caller goes on without them
        now = time.monotonic()
        if now - _logged_at.get((role, method), -LOG_EVERY_S) >= LOG_EVERY_S:
            _logged_at[role, method] = now
            logger.warning("%s: no %s replica can be asked: %r", method, role, error)
        return []


async def replies_of(role: str, method: str, asked: DeploymentBroadcastResponse, timeout_s: float) -> list[Any]:
    """The replies that come within `timeout_s`; replicas that fail or are late are logged and left out.

    Raises what Serve raises where no replica can be asked, TimeoutError where it does not say in time which there are.
    """
    until = asyncio.get_running_loop().time() + timeout_s
    async with asyncio.timeout_at(until):
        replicas = await replica_results(asked)
    waiting = (_reply(replica, until) for replica in replicas)
    replies = await asyncio.gather(*waiting, return_exceptions=True)
    for reply in replies:
        if isinstance(reply, TimeoutError):
            logger.warning("%s: a %s replica gave no answer in %g s", method, role, timeout_s)
        elif isinstance(reply, BaseException):
            logger.warning("%s failed on a %s replica: %r", method, role, reply)
    return [reply for reply in replies if not isinstance(reply, BaseException)]


async def _reply(replica: Any, until: float) -> Any:
    async with asyncio.timeout_at(until):
        return await replica.get_async()
