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


class LostNodes:
    """Dead nodes in Ray's node table: the time of detection, and whether they are reported."""

    def __init__(self, dead: Iterable[str], gone_s: float) -> None:
        self._gone_s = gone_s
        self._reported = set(dead)
        self._since: dict[str, float] = {}

    def look(self, dead: Iterable[str], now: float) -> list[str]:
        self._reported &= set(dead)  # Ray forgets nodes that died long ago
        for node_id in set(dead) - self._reported:
            self._since.setdefault(node_id, now)
        return [node_id for node_id, since in self._since.items() if now - since >= self._gone_s]

    def reported(self, node_id: str) -> None:
        self._reported.add(node_id)
        del self._since[node_id]


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
    nodes = LostNodes(dead_before, gone_s)
    while True:
        try:
            dead = await asyncio.to_thread(_dead_nodes)
            for node_id in nodes.look(dead, time.monotonic()):
                await report(engines_of(node_id))
                nodes.reported(node_id)
                logger.warning("node %s is lost: its engines are presumed to have ended", node_id)
        except Exception:
            # The Ray head or the engine may have failed, for a while or permanently.
            logger.exception("cannot check for lost nodes, or report one; trying again")
        await asyncio.sleep(POLL_S)


def _dead_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if not node["Alive"]]
