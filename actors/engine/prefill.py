"""The Prefill deployment: computes prompts and hands their KV over to decode engines."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from actors.engine.engine_actor import FIRST_REQUEST_TIMEOUT_S, CallItem, EngineActor
from actors.engine.pair_warmup import PeerReplicas, probe_timeout_s
from actors.request import Call, ProducerAddress
from actors.rpc.messages import RpcRequest
from configs.settings import RoleName, ServiceSettings


class Prefill(EngineActor):
    """An engine in the producer role."""

    role: RoleName = "prefill"

    async def _prepare(self, settings: ServiceSettings) -> None:
        self._held: set[str] = set()
        self._probe_s = probe_timeout_s(settings.transfer)
        self._producer: ProducerAddress = await self.engine.describe_producer(FIRST_REQUEST_TIMEOUT_S)
        await self._warm_up_pairs()

    def _router_methods(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        return super()._router_methods() | {"discard": self.discard}

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the replica's metadata with the address of its producer."""
        return super().record_replica_metadata() | {"producer": asdict(self._producer)}

    async def serve_request(self, request: RpcRequest) -> AsyncGenerator[CallItem, None]:
        """Answer a request of the RPC server: a prefill leg, or a request that is not split."""
        if request.transfer_id is None:
            answer = self.call(request.call)
        else:
            answer = self.call_and_hold(request.call, request.transfer_id, request.hold_s)
        async with aclosing(answer):
            async for item in answer:
                yield item

    async def call_and_hold(self, call: Call, transfer_id: str, hold_s: float) -> AsyncGenerator[CallItem, None]:
        """Serve `call` and count it as ongoing until the caller cancels it, at most `hold_s` after
        the answer.

        The engine answers before its KV has arrived: a stopping replica must wait for the handover,
        and the autoscaler must count the load.
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
        """Return a probe for a decode replica that has met the engines in `known`; None if this
        engine is one of them."""
        if self._producer.remote_engine_id in known:
            return None
        return await self.engine.produce_probe(self._probe_s)

    async def _warm_up_pairs(self) -> None:
        """Have each running decode replica fetch a probe before this replica is ready."""
        decode = PeerReplicas("decode", self._probe_s)
        replicas = await decode.ask("ping")
        probes = {replica: await self.engine.produce_probe(self._probe_s) for replica in replicas}
        if probes:
            await decode.ask("fetch_probes", probes)

    async def discard(self, transfer_id: str) -> None:
        """Free the KV of a call that this replica holds; ignore the transfers of other replicas."""
        if transfer_id in self._held:
            await self.engine.discard(transfer_id)
