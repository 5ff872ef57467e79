"""The Prefill deployment: computes prompts and hands their KV over to decode engines."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any

from actors.engine.arguments import why_no_first_token
from actors.engine.engine_actor import FIRST_REQUEST_TIMEOUT_S, CallItem, EngineActor
from actors.engine.pair_warmup import PeerReplicas, probe_timeout_s
from actors.request import Call, ProducerAddress
from actors.rpc.messages import RpcRequest
from configs.settings import RoleName, ServiceSettings

logger = logging.getLogger(__name__)


class Prefill(EngineActor):
    """An engine in the producer role."""

    role: RoleName = "prefill"

    async def _prepare(self, settings: ServiceSettings) -> None:
        self._held: set[str] = set()
        self._probe_s = probe_timeout_s(settings.transfer)
        self._producer: ProducerAddress = await self.engine.describe_producer(FIRST_REQUEST_TIMEOUT_S)
        if problem := why_no_first_token(settings):
            logger.info("this engine samples no first tokens: %s", problem)
            self._producer = replace(self._producer, first_token_multiple=0)
        await self._warm_up_pairs()

    def _router_methods(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        return super()._router_methods() | {"discard": self.discard}

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the replica's metadata with the address of its producer."""
        return super().record_replica_metadata() | {"producer": asdict(self._producer)}

    async def serve_request(self, request: RpcRequest) -> AsyncGenerator[CallItem, None]:
        """Answer a request of the RPC server: a prefill leg if it has a transfer id."""
        if request.transfer_id is None:
            answer = self.call(request.call)
        else:
            answer = self.call_and_hold(request.call, request.transfer_id, request.hold_s)
        async with aclosing(answer):
            async for item in answer:
                yield item

    async def call_and_hold(self, call: Call, transfer_id: str, hold_s: float) -> AsyncGenerator[CallItem, None]:
        """Serve `call`, then keep it ongoing until the caller cancels it, for at most `hold_s`.

        The engine answers before decode has received the KV. The ongoing call makes a stopping
        replica wait for the handover, and the autoscaler counts it.
        """
        self._held.add(transfer_id)
        try:
            async with aclosing(self.call(call)) as answer:
                async for item in answer:
                    yield item
            await asyncio.sleep(hold_s)
        finally:
            self._held.discard(transfer_id)

    async def probe_for(self, known: Collection[str]) -> dict[str, Any] | None:
        """Return the parameters of a probe, or None if this engine's id is in `known`."""
        if self._producer.remote_engine_id in known:
            return None
        return await self.engine.produce_probe(self._probe_s)

    async def _warm_up_pairs(self) -> None:
        """Make each running decode replica fetch a probe before this replica is ready."""
        decode = PeerReplicas("decode", self._probe_s)
        replicas = await decode.ask("ping")
        probes = {replica: await self.engine.produce_probe(self._probe_s) for replica in replicas}
        if probes:
            await decode.ask("fetch_probes", probes)

    async def discard(self, transfer_id: str) -> None:
        """Free the KV of a transfer; ignore transfers without a call on this replica."""
        if transfer_id in self._held:
            await self.engine.discard(transfer_id)
