"""Which prefill engines have ended with their hosts: Ray's word, for the connector of a decode engine.

A decode engine keeps blocks that a prefill engine may still write to. A process that has ended on a host that lives
is found out by the connector itself; a host that answers nothing proves nothing. Ray declares such a node dead, and a
node that has lost Ray's head ends itself with all its actors in bounded time (docs/decisions/0015): `node_lost_s` after
the one the other is true. An engine's id begins with its node's, so that nobody need remember who ran where.
"""

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable

import ray

logger = logging.getLogger(__name__)

POLL_S = 2.0


def new_engine_id() -> str:
    """An id for an engine of this process's Ray node, if it has one: new at every call."""
    node = engines_of(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""
    return node + uuid.uuid4().hex


def engines_of(node_id: str) -> str:
    """What the ids of a node's engines begin with."""
    return f"{node_id}."


class LostNodes:
    """What Ray's node table says, over time. Nodes that were dead before the first look have never met our engine."""

    def __init__(self, dead: Iterable[str], gone_s: float) -> None:
        self._gone_s = gone_s
        self._told = set(dead)
        self._since: dict[str, float] = {}

    def look(self, dead: Iterable[str], now: float) -> list[str]:
        """Nodes that have been dead for `gone_s`, until each is `told`."""
        for node_id in set(dead) - self._told:
            self._since.setdefault(node_id, now)
        return [node_id for node_id, since in self._since.items() if now - since >= self._gone_s]

    def told(self, node_id: str) -> None:
        self._told.add(node_id)
        del self._since[node_id]


async def dead_nodes_now() -> list[str]:
    """The nodes that are dead now; to be asked before an engine meets any other. None where Ray does not say: then
    the watch tells of all of them, which does no harm."""
    try:
        return await asyncio.to_thread(_dead_nodes)
    except Exception:
        logger.exception("cannot tell which hosts were lost before this engine started")
        return []


async def watch_nodes(tell: Callable[[str], Awaitable[None]], gone_s: float, dead_before: Iterable[str]) -> None:
    """Until cancelled: `tell` what the ids of engines begin with whose node has been dead for `gone_s`.

    `dead_before` are the nodes of which no engine can have been met (`dead_nodes_now`).
    """
    hosts = LostNodes(dead_before, gone_s)
    while True:
        try:
            dead = await asyncio.to_thread(_dead_nodes)
            for node_id in hosts.look(dead, time.monotonic()):
                await tell(engines_of(node_id))
                hosts.told(node_id)
                logger.warning("node %s is dead: its prefill engines write no more", node_id)
        except Exception:
            # Ray's head or the engine; whoever serves requests will say more of either.
            logger.exception("cannot tell which hosts are lost; trying again")
        await asyncio.sleep(POLL_S)


def _dead_nodes() -> list[str]:
    return [node["NodeID"] for node in ray.nodes() if not node["Alive"]]
