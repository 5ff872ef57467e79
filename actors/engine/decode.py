"""The Decode deployment: generates tokens from KV of prefill engines, or serves whole requests."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from actors.engine.asgi_call import Notices
from actors.engine.engine_actor import CallItem, EngineActor
from actors.engine.moves import move_streams
from actors.engine.pair_warmup import (
    CALL_MARGIN_S,
    WARM_UP_INTERVAL_S,
    PeerReplicas,
    ProbeParams,
    every,
    probe_timeout_s,
)
from actors.engine.split.split_call import SplitCall
from actors.request import Call
from actors.rpc.messages import RpcRequest
from actors.rpc.server_connection import ServedStream
from configs.settings.base import RoleName
from configs.settings.service import ServiceSettings

logger = logging.getLogger(__name__)

MOST_WARM = 1024


class Decode(EngineActor):
    """Actor of an engine whose connector is a KV consumer."""

    role: RoleName = "decode"

    async def _prepare(self, settings: ServiceSettings) -> None:
        await self._watch_nodes(settings)
        self._probe_s = probe_timeout_s(settings.transfer)
        self._prefill = PeerReplicas("prefill", self._probe_s)
        self._others = PeerReplicas("decode", CALL_MARGIN_S)
        # The latest MOST_WARM prefill engines with which a rank has run a probe, by rank.
        self._warm: list[dict[str, None]] = [{} for _ in self.engine.ranks]
        await self.warm_up_new_pairs()
        looking = every(WARM_UP_INTERVAL_S, self.warm_up_new_pairs)
        self._tasks.append(asyncio.create_task(looking, name="meets-prefill-replicas"))

    def serve_request(self, rank: int, request: RpcRequest, stream: ServedStream) -> AsyncGenerator[CallItem, None]:
        if request.prefill is None:
            return super().serve_request(rank, request, stream)
        heartbeats = partial(self.engine.heartbeats, rank)
        split = SplitCall(request.call, request.prefill, self._channels, partial(self._serve, rank), heartbeats)
        return split.items(self.accepted(rank))

    def _serve(self, rank: int, call: Call, notices: Notices, began_at: float) -> AsyncGenerator[Any, None]:
        return self.engine.serve(call, rank, notices, began_at)

    async def identities(self) -> list[str]:
        """Return the identities of the ranks that accept calls, for replicas whose streams move."""
        await self.engine.check_health()
        ranks = zip(self._rpc_servers, self.engine.described, strict=True)
        return [described.get("identity", "") for server, described in ranks if not server.leaving.is_set()]

    async def _drain(self) -> None:
        moving = [
            asyncio.create_task(move_streams(self.engine, rank, server, self._others), name="moves-streams")
            for rank, server in enumerate(getattr(self, "_rpc_servers", ()))
        ]
        try:
            await super()._drain()
        finally:
            for task in moving:
                task.cancel()

    async def fetch_probes(self, probes: Mapping[str, list[ProbeParams]]) -> None:
        """Fetch the probes, by rank id, of a starting prefill replica."""
        ranks = enumerate(self.engines)
        await self._fetch_all([(rank, probe) for rank, name in ranks for probe in probes.get(name, ())])

    @property
    def warm(self) -> frozenset[str]:
        """Ids of the prefill engines with which every rank has run a probe, also a failed one."""
        return frozenset.intersection(*map(frozenset, self._warm))

    async def warm_up_new_pairs(self) -> None:
        await asyncio.gather(*(self._warm_up_new_pairs(rank) for rank in range(len(self._warm))))

    async def _warm_up_new_pairs(self, rank: int) -> None:
        replies = await self._prefill.ask("probes_for", frozenset(self._warm[rank]))
        await self._fetch_all([(rank, probe) for reply in replies for probe in reply])

    async def _fetch_all(self, probes: Sequence[tuple[int, ProbeParams]]) -> None:
        """Fetch probes in parallel: an unreachable engine takes the whole timeout."""
        fetches = await asyncio.gather(*(self._fetch(rank, probe) for rank, probe in probes), return_exceptions=True)
        for (_, probe), problem in zip(probes, fetches, strict=True):
            if isinstance(problem, TimeoutError):
                # Not fatal: after a failed transfer the decode engine computes the prompt.
                logger.warning(
                    "warm-up with prefill engine %s timed out; it is repeated, and requests use the engine meanwhile",
                    probe.get("remote_engine_id"),
                )
            elif problem is not None:
                raise problem

    async def _fetch(self, rank: int, probe: ProbeParams) -> None:
        await self.engine.consume_probe(probe, self._probe_s, rank)
        warm = self._warm[rank]
        warm[probe["remote_engine_id"]] = None
        if len(warm) > MOST_WARM:
            del warm[next(iter(warm))]
        logger.info("warm-up with prefill engine %s is complete: its probe has run", probe["remote_engine_id"])
