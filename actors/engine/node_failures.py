"""Detect the loss of nodes, for the connectors of the engines on other nodes.

A prefill engine forgets failed transfers to the engines of a lost node. A decode engine must not
reuse blocks while a prefill engine may write to them, and its connector detects the end of a
process on a reachable host only. Ray marks an unreachable node dead; a node without contact to the
Ray head ends its actors within a bounded time. So writes are presumed stopped `node_lost_s` after
Ray marks the node dead (docs/decisions/0014). An engine id begins with the id of its node, which
identifies all engines of a lost node.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable

import ray

from actors.errors import EngineStartError
from actors.upstream.ray_private import RECONNECT_VARIABLE, cut_off_node_s

logger = logging.getLogger(__name__)

POLL_S = 2.0

MARGIN_S = 120.0


def new_engine_id() -> str:
    node = engines_of(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
    return node + uuid.uuid4().hex


def engines_of(node_id: str) -> str:
    return f"{node_id}."


def grace_s(node_lost_s: float | None) -> float:
    """Return the seconds after which writes from a node that Ray shows as dead are presumed
    stopped.

    Raises EngineStartError if a prefill engine on a cut-off node may run longer: it could write to
    blocks that decode has given to another request.
    """
    ends_s = cut_off_node_s()
    if node_lost_s is None:
        return ends_s + MARGIN_S
    if node_lost_s < ends_s:
        raise EngineStartError(
            f"transfer.node_lost_s must be at least {ends_s:g} s, not {node_lost_s:g} s: on a node that is cut off, "
            f"actors may run for {ends_s:g} s (RAY_grpc_client_keepalive_timeout_ms, {RECONNECT_VARIABLE}). "
            "Raise node_lost_s, or leave it unset"
        )
    return node_lost_s


async def dead_nodes_now() -> list[str]:
    """Return the ids of nodes that are already dead, which this engine need not report.

    Empty if Ray's table cannot be read: reporting these nodes too is harmless.
    """
    try:
        return await asyncio.to_thread(_dead_nodes)
    except Exception:
        logger.exception("cannot list Ray's nodes; nodes that are already dead will be reported as lost")
        return []


async def watch_nodes(report: Callable[[str], Awaitable[None]], gone_s: float, dead_before: Iterable[str]) -> None:
    """Report the engine id prefix of each node dead for `gone_s` seconds, until cancelled."""
    reported, since = set(dead_before), dict[str, float]()
    while True:
        try:
            dead = set(await asyncio.to_thread(_dead_nodes))
            reported &= dead  # Ray forgets nodes that died long ago
            now = time.monotonic()
            since = dict.fromkeys(dead - reported, now) | since
            for node_id in [one for one, dead_at in since.items() if now - dead_at >= gone_s]:
                await report(engines_of(node_id))
                reported.add(node_id)
                del since[node_id]
                logger.warning("node %s is lost: its engines are presumed to have ended", node_id)
        except Exception:
            # The Ray head or the engine may have failed, for a while or permanently.
            logger.exception("cannot check for lost nodes, or report one; trying again")
        await asyncio.sleep(POLL_S)


def _dead_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if not node["Alive"]]
