"""The router over real engines in this process, without Ray; engines die at given tokens.

This tests the router, vLLM's serving layer, and engines that repeat tokens that were sent.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from actors.engine.arguments import engine_environment
from actors.engine.vllm_engine import VllmEngine
from actors.errors import EngineDownError
from actors.request import Call, Endpoint, ResponseStart, StreamChunk
from actors.router.client_request import ClientRequest
from actors.router.router import Router
from configs.settings.base import RoleName
from configs.settings.router import RouterLimits
from configs.settings.service import ServiceSettings
from testing.answers import whole_body
from testing.streams import FRONTEND
from tests.actors.fleet import Handle, Replica, router_of

SETTINGS = ServiceSettings(
    engine={
        "max_model_len": 1024,
        "block_size": 16,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "enable_prefix_caching": False,
    },
    frontend=FRONTEND,
)
REQUEST_ID = b"x-request-id"
HEADERS = ((b"content-type", b"application/json"), (REQUEST_ID, b"the-same"))
ATTEMPTS = 30


@dataclass
class Fault:
    """An engine's death after ``dies_at`` tokens.

    None: never; 0: before the first item after the start; -1: after that item. With ``moves``, the
    engine moves the stream instead, and a stream that stays loses it after that number of further
    tokens; 0: never. ``received``: whether each of its calls has received its KV.
    """

    dies_at: int | None = None
    moves: int | None = None
    received: list[bool] = field(default_factory=list)


async def start(role: RoleName = "decode", settings: ServiceSettings = SETTINGS) -> VllmEngine:
    """Start an engine as the actor of its role does; the demo model's by default."""
    os.environ.update(engine_environment(settings, role))
    return await VllmEngine.start(settings, role, "127.0.0.1")


def identity_of(engine: VllmEngine) -> str:
    return str(engine.described[0]["identity"])


def request(endpoint: Endpoint, body: dict[str, Any]) -> ClientRequest:
    return ClientRequest(endpoint, HEADERS, json.dumps(body).encode(), body)


async def _answer(engine: VllmEngine, call: Call, fault: Fault) -> AsyncGenerator[Any, None]:
    tokens = 0
    async with aclosing(engine.serve(call)) as items:
        async for item in items:
            if fault.dies_at == 0 and not isinstance(item, ResponseStart):
                raise EngineDownError("as if killed")
            yield item
            if fault.dies_at == -1 and not isinstance(item, ResponseStart):
                raise EngineDownError("as if killed")
            tokens += sum(map(len, item.groups)) if isinstance(item, StreamChunk) else 0
            if isinstance(item, StreamChunk) and item.timings is not None:
                fault.received.append(item.timings.kv_ended_s is not None and not item.timings.kv_failed)
            if not fault.dies_at or not 0 < fault.dies_at <= tokens:
                continue
            if fault.moves is None or 0 < fault.moves <= tokens - fault.dies_at:
                raise EngineDownError("as if killed")
            for each in engine.movable():
                if dict(call.headers)[REQUEST_ID].decode() in each:
                    await engine.move(each)


def serve(engine: VllmEngine, fault: Fault) -> Any:
    return lambda call, _: _answer(engine, call, fault)


class NothingLeftError(AssertionError):
    """In all attempts, the chunk that had the token of the death had all remaining tokens too."""


async def stream(
    engine: VllmEngine,
    endpoint: Endpoint,
    body: dict[str, Any],
    dies_at: int | None = None,
    heir: VllmEngine | None = None,
    heirs_identity: str | None = None,
    moves: bool = False,
) -> bytes:
    """Return the client's stream if the first engine dies after `dies_at` tokens, or `moves` it.

    ``heir``            engine that acts as the second one; None: `engine`
    ``heirs_identity``  identity in the heir's metadata; None: its own

    vLLM joins outputs that the serving layer has not read, and sends nothing for tokens that a tool
    parser holds back. So the chunk with this token may have all remaining tokens, and nothing is
    left to resume. Raises NothingLeftError if this is so in each of ATTEMPTS streams.
    """
    heir = heir or engine
    outcome = "moved" if moves else "resumed"
    for _ in range(ATTEMPTS):
        heirs = Fault()
        fault = Fault(dies_at, moves=0 if moves else None)
        sent, router = await interrupted(engine, request(endpoint, body), fault, heir, heirs, heirs_identity)
        resumed = router.metrics.registry.get_sample_value("tandem_resumed_streams_total", {"outcome": outcome})
        if bool(resumed) == (dies_at is not None):
            assert heirs.received == ([True] if moves else []) or not moves
            return sent
    raise NothingLeftError(f"no chunk ended at or after token {dies_at} and before the last token")


async def interrupted(
    engine: VllmEngine,
    asked: ClientRequest,
    fault: Fault,
    heir: VllmEngine,
    heirs: Fault,
    heirs_identity: str | None = None,
) -> tuple[bytes, Router]:
    """Return the client's stream, of an engine with a fault and its heir, and the router."""
    limits = RouterLimits(request_timeout_s=60, prefill_wait_s=0.01)
    second = Replica("heir", serve(heir, heirs), identity=heirs_identity or identity_of(heir))
    first = Replica("mortal", serve(engine, fault), identity=identity_of(engine))
    decode = Handle([second, first])
    decode.in_order = True
    router = router_of(limits, Handle([]), decode)
    async with router.answer(asked) as answer:
        sent = await whole_body(answer)
        assert answer.start.streams, sent
    return sent, router
