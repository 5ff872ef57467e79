"""The router over one real prefill and one real decode engine, without Ray."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any

from actors.engine.arguments import engine_environment
from actors.engine.vllm_engine import VllmEngine
from actors.errors import EngineDownError
from actors.request import TRANSFER_FIELD, Call, Endpoint, ProducerAddress, ResponseStart, StreamChunk
from actors.router.client_request import ClientRequest
from actors.router.router import Router
from configs.settings.router import RouterLimits, RoutingSettings
from configs.settings.service import ServiceSettings
from testing.streams import FRONTEND
from tests.actors.fleet import Handle, Replica, router_of
from tests.e2e.broken_streams import identity_of

BLOCK_TOKENS = 16
SETTINGS = ServiceSettings(
    engine={
        "max_model_len": 1024,
        "block_size": BLOCK_TOKENS,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
    },
    frontend=FRONTEND,
)
HEADERS = ((b"content-type", b"application/json"), (b"x-request-id", b"the-same"))

Change = Callable[[Call], Call]


@dataclass
class Fault:
    """Fault of an engine's answer.

    ``dies_at``  number of tokens after which it dies; None: it does not
    ``change``   changes the calls that it receives
    """

    dies_at: int | None = None
    change: Change = lambda call: call


@dataclass
class EnginePair:
    prefill: VllmEngine
    decode: VllmEngine
    address: ProducerAddress

    @classmethod
    async def start(cls) -> EnginePair:
        engines = []
        for role in ("prefill", "decode"):
            os.environ.update(engine_environment(SETTINGS, role))
            engines.append(await VllmEngine.start(SETTINGS, role, "127.0.0.1"))
        prefill, decode = engines
        return cls(prefill, decode, prefill.producer())

    async def close(self) -> None:
        await self.prefill.close()
        await self.decode.close()

    async def idle(self, within_s: float = 60.0) -> bool:
        """Return whether all blocks of both pools are freed within a limited time."""
        give_up_at = asyncio.get_running_loop().time() + within_s
        while asyncio.get_running_loop().time() < give_up_at:
            llms = (self.prefill._llm, self.decode._llm)  # noqa: SLF001 - no public way to the block pools
            if all([await llm.reset_prefix_cache() for llm in llms]):
                return True
            await asyncio.sleep(0.05)
        return False

    def router(self, first_token: str, *faults: Fault) -> tuple[Router, Handle, Handle]:
        """A router whose engines have these faults: prefill's, then those of decode replicas in
        this order.
        """
        prefill, *decode = faults or (Fault(),)
        limits = RouterLimits(
            request_timeout_s=60, first_token=first_token, routing=RoutingSettings(policy="always_remote")
        )
        sampled = asyncio.Event()
        p = Handle([Replica("p", _serve_prefill(self.prefill, prefill, sampled), identity=identity_of(self.prefill))])
        serves = [
            _serve_decode(self.decode, fault, sampled if first_token == "prefill" else None)
            for fault in decode or (Fault(),)
        ]
        identity = identity_of(self.decode)
        replicas = [Replica(f"d{index}", serve, identity=identity) for index, serve in enumerate(serves)]
        d = Handle(replicas[::-1])
        d.in_order = True
        p.metadata = {"producer": asdict(self.address)}

        p.discard = self.prefill.discard
        return router_of(limits, p, d), p, d


def _serve_prefill(engine: VllmEngine, fault: Fault, sampled: asyncio.Event) -> Any:
    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        async with aclosing(_answer(engine, call, fault)) as items:
            async for item in items:
                yield item
                if isinstance(item, StreamChunk):
                    sampled.set()
        if TRANSFER_FIELD in json.loads(call.body):
            await asyncio.sleep(60)  # as `Prefill.call_and_hold`

    return serve


def _serve_decode(engine: VllmEngine, fault: Fault, sampled: asyncio.Event | None) -> Any:
    """An engine that is slower than prefill: both are on one machine, where the KV moves at
    once.
    """

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        async with aclosing(_answer(engine, call, fault)) as items:
            async for item in items:
                if sampled is not None and isinstance(item, StreamChunk):
                    await asyncio.wait_for(sampled.wait(), 60)
                    await asyncio.sleep(0.002)  # until the router has read it
                yield item

    return serve


async def _answer(engine: VllmEngine, call: Call, fault: Fault) -> AsyncGenerator[Any, None]:
    tokens = 0
    async with aclosing(engine.serve(fault.change(call))) as items:
        async for item in items:
            if fault.dies_at == 0 and not isinstance(item, ResponseStart):
                raise EngineDownError("as if killed")
            yield item
            tokens += sum(map(len, item.groups)) if isinstance(item, StreamChunk) else 0
            if fault.dies_at and tokens >= fault.dies_at:
                raise EngineDownError("as if killed")


def request(endpoint: Endpoint, body: dict[str, Any]) -> ClientRequest:
    return ClientRequest(endpoint, HEADERS, json.dumps(body).encode(), body)
