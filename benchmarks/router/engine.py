"""An engine that computes nothing: vLLM's completions route, at once or at a steady pace.

    python -m benchmarks.router.engine 9000

The same application is behind every arm: over HTTP as here (on uvloop, as in vLLM's own server), or
inside Tandem's actors. A request with `do_remote_decode` gets the parameters of a transfer; every
other one gets `max_tokens` tokens. With `pace_ms` (a field of the body), the engine makes steps at
intervals of `pace_ms`, and each step yields a token of every stream, as vLLM's steps do. Each
token's event has the time of its creation, on the host's monotonic clock.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import AsyncGenerator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.replay_log import SERVED_CALL
from actors.request import TRANSFER_FIELD

MODEL = "instant"
WHERE = {"remote_engine_id": "instant", "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1}
"""Address of its KV, which no other process reads."""

HANDED_OVER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[0]],
    "remote_request_id": "cmpl-instant",
    **WHERE,
}


def freeze_gc() -> None:
    """Exclude the objects of the start from collections, as vLLM's server does."""
    gc.collect()
    gc.freeze()


def instant() -> Starlette:
    return Starlette(
        routes=[
            Route("/v1/completions", complete, methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/health", health, methods=["GET"]),
        ]
    )


async def complete(request: Request) -> Response:
    body = json.loads(await request.body())
    transfer = body.get(TRANSFER_FIELD) or {}
    if transfer.get("do_remote_decode"):
        return JSONResponse(whole(1) | {TRANSFER_FIELD: HANDED_OVER})
    tokens = int(body.get("max_tokens", 16))
    if not body.get("stream"):
        return JSONResponse(whole(tokens))
    return StreamingResponse(events(tokens, float(body.get("pace_ms", 0)) / 1e3), media_type="text/event-stream")


def whole(tokens: int) -> dict[str, Any]:
    """Return an answer that is not a stream."""
    return {
        "id": "cmpl-instant",
        "object": "text_completion",
        "model": MODEL,
        "choices": [{"index": 0, "text": " token" * tokens, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1},
    }


async def events(tokens: int, pace_s: float) -> AsyncGenerator[bytes, None]:
    """Yield `tokens` events: one at once, the others at the following steps.

    All streams have the same steps, at multiples of `pace_s` on the monotonic clock. Late events
    follow without a pause.
    """
    step = time.monotonic() // pace_s if pace_s else 0.0
    served = SERVED_CALL.get()  # inside one of Tandem's actors: record the tokens for the router
    for number in range(tokens):
        if number:
            # Even an instant engine yields to its event loop after each token, as vLLM does.
            await asyncio.sleep(max((step + number) * pace_s - time.monotonic(), 0) if pace_s else 0)
        if served is not None:
            served.record([number])
        choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
        if number == tokens - 1:
            choice["finish_reason"] = "length"
        head = {"id": "cmpl-instant", "object": "text_completion", "created": 0, "model": MODEL}
        yield b"data: %s\n\n" % json.dumps({**head, "choices": [choice], "made_ns": time.monotonic_ns()}).encode()
    yield b"data: [DONE]\n\n"


async def models(_: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "nobody"}]})


async def health(_: Request) -> Response:
    return Response()


if __name__ == "__main__":
    freeze_gc()
    uvicorn.run(
        instant(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", loop="uvloop", http="httptools"
    )
