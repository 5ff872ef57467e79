"""The router over one real engine that acts as two, the first of which dies at a given token.

No Ray: this tests the router, vLLM's serving layer, and an engine that repeats sent tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from actors.engine.arguments import engine_environment
from actors.engine.vllm_engine import VllmEngine
from actors.errors import EngineDownError
from actors.request import Call, Endpoint, ResponseStart, StreamChunk
from actors.router.client_request import ClientRequest
from configs.settings.router import RouterLimits
from configs.settings.service import ServiceSettings
from testing.answers import whole_body
from testing.streams import FRONTEND
from tests.actors.fleet import Handle, Replica, router_of

SETTINGS = ServiceSettings(
    engine={"max_model_len": 2048, "block_size": 128, "max_num_batched_tokens": 256, "max_num_seqs": 16},
    frontend=FRONTEND,
)
LIMITS = RouterLimits(request_timeout_s=60, prefill_wait_s=0.01)
ATTEMPTS = 30
HEADERS = ((b"content-type", b"application/json"), (b"x-request-id", b"the-same"))


class NothingLeftError(AssertionError):
    """In all attempts, the chunk that had the token of the death had all remaining tokens too."""


async def start_decode(settings: ServiceSettings = SETTINGS) -> VllmEngine:
    """A decode engine, started as the Decode actor starts it; the demo model's by default."""
    os.environ.update(engine_environment(settings, "decode"))
    return await VllmEngine.start(settings, "decode", "127.0.0.1")


def identity_of(engine: VllmEngine) -> str:
    return str(engine.described[0]["identity"])


async def stream(
    engine: VllmEngine,
    endpoint: Endpoint,
    body: dict[str, Any],
    dies_at: int | None = None,
    heir: VllmEngine | None = None,
    heirs_identity: str | None = None,
) -> bytes:
    """Return the client's stream if the first engine dies after `dies_at` tokens.

    ``heir``            engine that acts as the second one; None: `engine`
    ``heirs_identity``  identity in the heir's metadata; None: its own

    vLLM joins outputs that the serving layer has not read, and sends nothing for tokens that a tool
    parser holds back. So the chunk with this token may have all remaining tokens, and nothing is
    left to resume. Raises NothingLeftError if this is so in each of ATTEMPTS streams.
    """
    for _ in range(ATTEMPTS):
        sent, resumed = await _stream(engine, endpoint, body, dies_at, heir or engine, heirs_identity)
        if resumed == (dies_at is not None):
            return sent
    raise NothingLeftError(f"no chunk ended at or after token {dies_at} and before the last token")


async def _stream(
    engine: VllmEngine,
    endpoint: Endpoint,
    body: dict[str, Any],
    dies_at: int | None,
    heir: VllmEngine,
    heirs_identity: str | None,
) -> tuple[bytes, bool]:
    """Return the client's stream, and whether it was resumed."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        async with aclosing(heir.serve(call)) as items:
            async for item in items:
                yield item

    async def die(call: Call, _: int) -> AsyncGenerator[Any, None]:
        tokens = 0
        async with aclosing(engine.serve(call)) as items:
            async for item in items:
                yield item
                tokens += sum(map(len, item.groups)) if isinstance(item, StreamChunk) else 0
                if dies_at is not None and tokens >= dies_at and not isinstance(item, ResponseStart):
                    raise EngineDownError("simulated death")

    second = Replica("heir", serve, identity=heirs_identity or identity_of(heir))
    prefill, decode = Handle([]), Handle([second, Replica("mortal", die, identity=identity_of(engine))])
    decode.in_order = True
    router = router_of(LIMITS, prefill, decode)
    request = ClientRequest(endpoint, HEADERS, json.dumps(body).encode(), body)
    async with router.answer(request) as answer:
        sent = await whole_body(answer)
        assert answer.start.streams, sent
    resumed = router.metrics.registry.get_sample_value("tandem_resumed_streams_total", {"outcome": "resumed"})
    return sent, bool(resumed)
