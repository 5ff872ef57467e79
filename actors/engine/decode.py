"""The Decode deployment: receives KV from prefill engines and generates, or serves a request alone."""

import asyncio
import logging
from collections.abc import Mapping

from actors.engine.engine_actor import FIRST_REQUEST_TIMEOUT_S, EngineActor
from actors.engine.node_failures import dead_nodes_now, watch_nodes
from actors.engine.pair_warmup import WARM_UP_INTERVAL_S, PeerReplicas, ProbeParams, every, probe_timeout_s
from configs.settings import RoleName, ServiceSettings

logger = logging.getLogger(__name__)


class Decode(EngineActor):
    """An engine in the consumer role."""

    role: RoleName = "decode"

    async def _prepare(self, settings: ServiceSettings) -> None:
        await self.engine.warm_up(FIRST_REQUEST_TIMEOUT_S)
        # Before the first contact with a prefill engine: nodes that are dead now do not matter.
        dead = await dead_nodes_now()
        lost = watch_nodes(self.engine.lose, settings.transfer.node_lost_s, dead)
        self._tasks = [asyncio.create_task(lost, name="watches-hosts")]
        self._probe_s = probe_timeout_s(settings.transfer)
        self._prefill = PeerReplicas("prefill", self._probe_s)
        self._warm: set[str] = set()
        await self.warm_up_new_pairs()
        looking = every(WARM_UP_INTERVAL_S, self.warm_up_new_pairs)
        self._tasks.append(asyncio.create_task(looking, name="meets-prefill-replicas"))

    async def __del__(self) -> None:
        # Drain calls first: until then prefill engines still appear and are lost.
        if hasattr(self, "_rpc_server"):
            await self._rpc_server.drain()
        for task in getattr(self, "_tasks", ()):
            task.cancel()
        await super().__del__()

    async def fetch_probes(self, probes: Mapping[str, ProbeParams]) -> None:
        """Fetch the probe that a starting prefill replica has computed for this replica."""
        if self.replica in probes:
            await self._fetch(probes[self.replica])

    @property
    def warm(self) -> frozenset[str]:
        """Ids of the prefill engines with which a probe has succeeded."""
        return frozenset(self._warm)

    async def warm_up_new_pairs(self) -> None:
        """Fetch a probe from each new prefill replica, concurrently: an unreachable one takes the
        whole timeout."""
        probes = [probe for probe in await self._prefill.ask("probe_for", frozenset(self._warm)) if probe]
        fetches = await asyncio.gather(*map(self._fetch, probes), return_exceptions=True)
        for probe, problem in zip(probes, fetches, strict=True):
            if isinstance(problem, TimeoutError):
                # Requests of this pair will be recomputed here; serve, and warm up the other pairs.
                logger.warning("warm-up with prefill engine %s timed out", probe.get("remote_engine_id"))
            elif problem is not None:
                raise problem

    async def _fetch(self, probe: ProbeParams) -> None:
        await self.engine.consume_probe(probe, self._probe_s)
        self._warm.add(probe["remote_engine_id"])
        logger.info("warmed up the pair with prefill engine %s", probe["remote_engine_id"])
