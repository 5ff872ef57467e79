"""Moves of the streams of a stopping decode engine to other engines, which continue them.

A stream that ends with `Moved` keeps its KV here until its router has continued it elsewhere and
cancels the call. The engine drains as before if no other engine of its identity accepts calls.
"""

import asyncio
import logging

from actors.engine.pair_warmup import PeerReplicas
from actors.engine.vllm_engine import VllmEngine
from actors.rpc.server import RpcServer

logger = logging.getLogger(__name__)

AT_ONCE = 8
"""Number of streams of a rank that move at the same time; the others go on here meanwhile."""

LOOK_S = 0.2
"""Interval in seconds between looks at the streams."""


async def move_streams(engine: VllmEngine, rank: int, server: RpcServer, others: PeerReplicas) -> None:
    """Move the streams of `rank` once `server` refuses calls, until the caller cancels this.

    Those that may have the most tokens left move first.
    """
    await server.leaving.wait()
    identity = engine.described[rank].get("identity", "")
    told: set[str] = set()
    while True:
        left = engine.movable(rank)
        waiting = sorted(left.keys() - told, key=left.__getitem__, reverse=True)[: AT_ONCE - len(told & left.keys())]
        if waiting and any(identity in own for own in await others.ask("identities")):
            for request_id in waiting:
                await engine.move(request_id, rank)
            told.update(waiting)
            logger.info(
                "rank %d is stopping: %d of its streams have been told to move; %d calls run",
                rank,
                len(told),
                server.ongoing,
            )
        await asyncio.sleep(LOOK_S)
