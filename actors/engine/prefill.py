"""The Prefill deployment: computes prompts and sends their KV to decode engines."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import asdict, replace
from functools import partial
from http import HTTPStatus
from typing import Any

from actors.engine.arguments import why_no_first_token
from actors.engine.engine_actor import CallItem, EngineActor
from actors.engine.pair_warmup import PeerReplicas, probe_timeout_s
from actors.engine_pool.discovery import ranked_metadata
from actors.request import ResponseStart, StreamChunk
from actors.rpc.messages import RpcRequest
from actors.rpc.server_connection import ServedStream
from configs.settings.base import RoleName
from configs.settings.service import ServiceSettings

logger = logging.getLogger(__name__)


class Prefill(EngineActor):
    """Actor of an engine whose connector is a KV producer."""

    role: RoleName = "prefill"

    async def _prepare(self, settings: ServiceSettings) -> None:
        await self._watch_nodes(settings)
        self._held: set[str] = set()
        self._probe_s = probe_timeout_s(settings.transfer)
        self._producers = [self.engine.producer(rank) for rank in self.engine.ranks]
        if problem := why_no_first_token(settings):
            logger.info("this engine samples no first tokens: %s", problem)
            self._producers = [replace(producer, first_token_multiple=0) for producer in self._producers]
        await self._warm_up_pairs()

    def _router_methods(self, rank: int) -> dict[str, Callable[..., Awaitable[Any]]]:
        return super()._router_methods(rank) | {"discard": partial(self.discard, rank)}

    def record_replica_metadata(self) -> dict[str, Any]:
        ranks = zip(self._rank_metadata, self._producers, strict=True)
        return ranked_metadata([metadata | {"producer": asdict(producer)} for metadata, producer in ranks])

    def serve_request(self, rank: int, request: RpcRequest, stream: ServedStream) -> AsyncGenerator[CallItem, None]:
        """Serve a call alone, or compute a prompt for decode if it has a transfer id."""
        if request.transfer_id is None:
            return super().serve_request(rank, request, stream)
        return self.call_and_hold(rank, request, request.transfer_id, stream)

    async def call_and_hold(
        self, rank: int, request: RpcRequest, transfer_id: str, stream: ServedStream
    ) -> AsyncGenerator[CallItem, None]:
        """Serve a call, then keep it ongoing until decode cancels it, for at most `hold_s`.

        The engine answers before decode has received the KV. The ongoing call makes a stopping
        replica wait for the handover, and the autoscaler counts it. A call that ends with an error
        status, or with a stream without tokens, has no KV and ends at once. Unless decode has the
        KV, discards the transfer: decode's connector may have asked for it.
        """
        self._held.add(transfer_id)
        computed = False
        try:
            async with aclosing(self.call(rank, request.call)) as answer:
                async for item in answer:
                    if isinstance(item, ResponseStart):
                        computed = item.status < HTTPStatus.BAD_REQUEST and not item.streams
                    computed = computed or isinstance(item, StreamChunk)
                    yield item
            if computed:
                await asyncio.sleep(request.hold_s)
        finally:
            self._held.discard(transfer_id)
            if not stream.done:
                await self._discard(rank, transfer_id)

    async def _discard(self, rank: int, transfer_id: str) -> None:
        try:
            await self.engine.discard(transfer_id, rank)
        except Exception as error:
            logger.warning("cannot discard transfer %s; its lease will expire: %r", transfer_id, error)

    async def probes_for(self, known: Collection[str]) -> list[dict[str, Any]]:
        """Return the `ProbeParams` of a probe on each rank whose engine id is not in `known`."""
        ranks = [
            rank
            for rank, producer in zip(self.engine.ranks, self._producers, strict=True)
            if producer.remote_engine_id not in known
        ]
        computing = (self.engine.produce_probe(self._probe_s, rank) for rank in ranks)
        probes = await asyncio.gather(*computing, return_exceptions=True)
        for rank, probe in zip(ranks, probes, strict=True):
            if isinstance(probe, TimeoutError):
                logger.warning("rank %d has computed no probe in %g s; decode requests it again", rank, self._probe_s)
            elif isinstance(probe, BaseException):
                raise probe
        return [probe for probe in probes if not isinstance(probe, BaseException)]

    async def _warm_up_pairs(self) -> None:
        decode = PeerReplicas("decode", self._probe_s)
        replicas = await decode.ask("engine_names")
        names = [name for names in replicas for name in names]
        probes = await asyncio.gather(*(self.probes_for(()) for _ in names))
        if names:
            await decode.ask("fetch_probes", dict(zip(names, probes, strict=True)))

    async def discard(self, rank: int, transfer_id: str) -> None:
        """Tell the connector of `rank` to free the KV of a transfer; for routers of version 1.

        Ignores transfers without an open call on this replica.
        """
        if transfer_id in self._held:
            await self.engine.discard(transfer_id, rank)
