"""Move the streams of a decode engine that refuses new calls to other engines.

A stream that ends with `Moved` keeps its KV here until its router has continued it elsewhere and
cancels the call. Without another engine of the same `likeness`, streams run to their end here.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from actors.engine.vllm_engine import VllmEngine
from actors.rpc.server import RpcServer

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Number of streams of a rank that move at the same time; the others go on here meanwhile."""

MOVES_S = 5.0
"""Time in seconds after which a stream that has not moved (its client may read nothing) no longer
counts as one of these.
"""

LOOK_S = 0.2
"""Interval in seconds between looks at the streams."""


def likeness(described: Mapping[str, Any]) -> str:
    """Return what must be equal on two ranks for one to continue the other's streams."""
    return f"{described.get('identity', '')} {described.get('frontend', '')}"


async def move_streams(engine: VllmEngine, rank: int, server: RpcServer, others: Callable[[], Collection[str]]) -> None:
    """Move the streams of `rank` while `server` refuses calls, until the caller cancels this.

    ``others``  returns the `likeness` of each other engine that can continue streams

    Those that may have the most tokens left move first.
    """
    own = likeness(engine.described[rank])
    told: dict[str, float] = {}
    while True:
        await server.refuses.wait()
        try:
            if own in others():
                await _move_some(engine, rank, told)
        except Exception:
            logger.exception("rank %d cannot move its streams, so they continue here; trying again", rank)
        await asyncio.sleep(LOOK_S)


async def _move_some(engine: VllmEngine, rank: int, told: dict[str, float]) -> None:
    left, now = engine.movable(rank), asyncio.get_running_loop().time()
    for ended in told.keys() - left.keys():
        del told[ended]
    moving = sum(now - at < MOVES_S for at in told.values())
    waiting = sorted(left.keys() - told.keys(), key=left.__getitem__, reverse=True)[: max(0, AT_ONCE - moving)]
    for request_id in waiting:
        told[request_id] = now
        await engine.move(request_id, rank)
    if waiting:
        logger.info("rank %d takes no new calls: %d of its %d streams move now", rank, len(waiting), len(left))
