"""The Prefill deployment: computes prompts and hands their KV to decode engines."""

import asyncio
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

from actors.engine.engine_actor import FIRST_REQUEST_TIMEOUT_S, CallItem, EngineActor
from actors.engine.pair_warmup import PeerReplicas, meet_s
from actors.request import Call, ProducerAddress
from actors.rpc.messages import RpcRequest
from configs.settings import RoleName, ServiceSettings


class Prefill(EngineActor):
    """An engine in the role of the producer."""

    role: RoleName = "prefill"

    async def _prepare(self, settings: ServiceSettings) -> None:
        self._held: set[str] = set()
        self._meet_s = meet_s(settings.transfer)
        self._producer: ProducerAddress = await self.engine.describe_producer(FIRST_REQUEST_TIMEOUT_S)
        await self._meet_decode()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Also where this engine's workers are reached."""
        return super().record_replica_metadata() | {"producer": asdict(self._producer)}

    async def serve_request(self, request: RpcRequest) -> AsyncGenerator[CallItem, None]:
        """Answer what came in by the door: a prefill leg, or a request that is not split."""
        if request.transfer_id is None:
            answer = self.call(request.call)
        else:
            answer = self.call_and_hold(request.call, request.transfer_id, request.hold_s)
        async with aclosing(answer):
            async for item in answer:
                yield item

    async def call_and_hold(self, call: Call, transfer_id: str, hold_s: float) -> AsyncGenerator[CallItem, None]:
        """Like `call`, but the request counts as ongoing until the caller cancels it, at most `hold_s` more.

        The engine has answered before its KV has arrived: a replica that is told to stop must wait for
        the handover, and an autoscaler must see the load.
        """
        self._held.add(transfer_id)
        try:
            async with aclosing(self.call(call)) as answer:
                async for item in answer:
                    yield item
            await asyncio.sleep(hold_s)
        finally:
            self._held.discard(transfer_id)

    async def introduce(self, known: Collection[str]) -> dict[str, Any] | None:
        """A probe for a decode replica that has met the engines of `known`; None where this one is among them."""
        if self._producer.remote_engine_id in known:
            return None
        return await self.engine.produce_probe(self._meet_s)

    async def _meet_decode(self) -> None:
        """Let the decode replicas that run fetch a probe each, before this one is ready."""
        decode = PeerReplicas("decode", self._meet_s)
        replicas = await decode.ask("ping")
        probes = {replica: await self.engine.produce_probe(self._meet_s) for replica in replicas}
        if probes:
            await decode.ask("meet", probes)

    async def discard(self, transfer_id: str) -> None:
        """Give back the KV of a call that is held here; a transfer of another replica's is none of ours."""
        if transfer_id in self._held:
            await self.engine.discard(transfer_id)
