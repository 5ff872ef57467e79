"""Stock vLLM servers behind a plain sequential proxy, without Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from testing.ports import free_port
from testing.programs import start_module
from testing.servers import Server

FACTS = (1, 5, 20, 21, 40, 80, 120, 160)
"""Facts of prompts of one to many blocks."""

OPTIONS = {"model": "demo", "max_tokens": 6, "temperature": 0, "logprobs": 2, "return_token_ids": True}


@contextmanager
def running(*servers: Server) -> Iterator[None]:
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_up()
        yield
    finally:
        for server in servers:
            server.destroy()


@contextmanager
def proxied(folder: Path, prefill: Server, decode: Server) -> Iterator[str]:
    port = free_port()
    with running(prefill, decode):
        words = ("--prefill", prefill.url, "--decode", decode.url, "--port", str(port))
        proxy = start_module(folder / "proxy.log", "testing.sequential_proxy", *words)
        proxy.wait_until_up(f"http://127.0.0.1:{port}/docs")
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            proxy.stop()


def complete(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=dict(body), timeout=120).raise_for_status()
    return dict(answer.json()["choices"][0])
