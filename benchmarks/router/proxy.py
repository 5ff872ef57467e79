"""The Python prefill/decode proxy of public examples, with streaming: prefill first, then decode.

    python -m benchmarks.router.proxy 9100 http://127.0.0.1:9000 http://127.0.0.1:9001

Uses FastAPI and httpx, like vLLM's own example for NixlConnector (`toy_proxy_server.py`).
"""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

from testing.sequential_proxy import PRODUCE


def proxy(prefill_url: str, decode_url: str) -> FastAPI:
    app = FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(timeout=120, limits=limits)

    @app.post("/v1/completions")
    async def complete(request: Request) -> StreamingResponse:
        body: dict[str, Any] = await request.json()
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": PRODUCE}
        answer = (await client.post(f"{prefill_url}/v1/completions", json=first)).raise_for_status()
        second = body | {"kv_transfer_params": answer.json()["kv_transfer_params"]}

        async def events() -> AsyncGenerator[bytes, None]:
            async with client.stream("POST", f"{decode_url}/v1/completions", json=second) as response:
                response.raise_for_status()
                async for some in response.aiter_bytes():
                    yield some

        return StreamingResponse(events(), media_type="text/event-stream")

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {}

    return app


if __name__ == "__main__":
    uvicorn.run(proxy(*sys.argv[2:4]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
