"""Minimal prefill/decode proxy, like those of public examples: prefill first, then decode.

    python -m testing.sequential_proxy --prefill http://127.0.0.1:8100 \
        --decode http://127.0.0.1:8200 --port 8300

It has no code specific to Tandem. It requests one token from the prefill server with
``do_remote_decode`` and passes the ``kv_transfer_params`` of the answer unchanged to the decode
server.
"""

from __future__ import annotations

import argparse
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

PRODUCE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Parameters that a public proxy sends with the prefill request."""


def proxy(prefill_url: str, decode_url: str) -> FastAPI:
    app = FastAPI()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(timeout=120, limits=limits)

    async def stream(url: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        async with client.stream("POST", url, json=body) as response:
            response.raise_for_status()
            async for some in response.aiter_bytes():
                yield some

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {}

    @app.post("/v1/{path:path}")
    async def forward(path: str, request: Request) -> Response:
        body: dict[str, Any] = await request.json()
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": PRODUCE}
        if path == "chat/completions":
            first["max_completion_tokens"] = 1
        answer = await client.post(f"{prefill_url}/v1/{path}", json=first)
        if answer.status_code != 200:
            return JSONResponse(answer.json(), answer.status_code)
        second = body | {"kv_transfer_params": answer.json()["kv_transfer_params"]}
        if body.get("stream"):
            return StreamingResponse(stream(f"{decode_url}/v1/{path}", second), media_type="text/event-stream")
        answer = await client.post(f"{decode_url}/v1/{path}", json=second)
        return JSONResponse(answer.json(), answer.status_code)

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--port", type=int, default=8300)
    arguments = parser.parse_args()
    uvicorn.run(proxy(arguments.prefill, arguments.decode), host="127.0.0.1", port=arguments.port, log_level="warning")


if __name__ == "__main__":
    main()
