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

MOVES_S = 5.0
"""Time in seconds after which a stream that has not moved (its client may read nothing) no longer
counts as one of these.
"""

LOOK_S = 0.2
"""Interval in seconds between looks at the streams."""


async def move_streams(engine: VllmEngine, rank: int, server: RpcServer, others: PeerReplicas) -> None:
    """Move the streams of `rank` once `server` refuses calls, until the caller cancels this.

    Those that may have the most tokens left move first.
    """
    await server.leaving.wait()
    identity = engine.described[rank].get("identity", "")
    told: dict[str, float] = {}
    while True:
        try:
            await _move_some(engine, rank, server, others, identity, told)
        except Exception:
            logger.exception("rank %d is stopping and could not move streams; they run on", rank)
        await asyncio.sleep(LOOK_S)


async def _move_some(
    engine: VllmEngine, rank: int, server: RpcServer, others: PeerReplicas, identity: str, told: dict[str, float]
) -> None:
    """Tell further streams to move, and record in `told` when."""
    left, now = engine.movable(rank), asyncio.get_running_loop().time()
    moving = sum(now - told[each] < MOVES_S for each in told.keys() & left.keys())
    waiting = sorted(left.keys() - told.keys(), key=left.__getitem__, reverse=True)[: max(0, AT_ONCE - moving)]
    if waiting and any(identity in own for own in await others.ask("identities")):
        for request_id in waiting:
            told[request_id] = now
            await engine.move(request_id, rank)
        logger.info(
            "rank %d is stopping: %d of its streams have been told to move; %d calls run",
            rank,
            len(told),
            server.ongoing,
        )
