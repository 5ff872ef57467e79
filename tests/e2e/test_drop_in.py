"""Two stock vLLM servers with Tandem's connector behind a plain sequential proxy, without Ray.

The answers equal those of one engine. vLLM starts the decode server's processes itself, by `spawn`;
those of other tests are forked (`testing/preload.py`).
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from testing.facts import make_prompt
from testing.ports import free_port
from testing.servers import Server
from testing.trace import read_trace
from testing.vllm_server import start_module, stop, wait_until_up

pytestmark = pytest.mark.engine


@dataclass(frozen=True)
class Servers:
    """Base URLs, and the file in which both engines trace their transfers."""

    decode: str
    proxy: str
    trace: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Start a prefill server, a decode server and the proxy in front of them."""
    folder = tmp_path_factory.mktemp("drop-in")
    trace = folder / "trace.jsonl"
    prefill, decode = (
        Server(role, free_port(), 1, folder, tandem(role, trace), forked=role == "kv_producer")
        for role in ("kv_producer", "kv_consumer")
    )
    proxy_url = f"http://127.0.0.1:{free_port()}"
    proxies = []
    try:
        for server in (prefill, decode):
            server.start()
        for server in (prefill, decode):
            server.wait_until_up()
        command = ["testing.sequential_proxy", "--prefill", prefill.url, "--decode", decode.url]
        proxies.append(start_module(folder, "proxy", [*command, "--port", proxy_url.rpartition(":")[2]]))
        wait_until_up(f"{proxy_url}/docs", proxies[0], folder)
        yield Servers(decode.url, proxy_url, trace)
    finally:
        stop(proxies)
        for server in (prefill, decode):
            server.destroy()


def tandem(role: str, trace: Path) -> dict[str, Any]:
    """Return ``--kv-transfer-config`` of a stock server."""
    return {
        "kv_connector": "TandemConnector",
        "kv_connector_module_path": "connectors.vllm_hma.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"trace_path": str(trace)},
    }


def test_the_proxy_answers_as_one_engine_does(servers: Servers) -> None:
    """Text, tokens and logprobs equal one engine's, and the recalled value is right, for 1 to many
    blocks.
    """
    rng = random.Random(7)
    for facts in (1, 5, 20, 21, 40, 80, 120, 160):
        recall = make_prompt(rng, facts)
        body = {
            "model": "demo",
            "prompt": recall.text,
            "max_tokens": 6,
            "temperature": 0,
            "logprobs": 2,
            "return_token_ids": True,
        }
        alone, through = _complete(servers.decode, body), _complete(servers.proxy, body)
        assert through["token_ids"] == alone["token_ids"]
        assert through["text"] == alone["text"]
        assert through["logprobs"]["token_logprobs"] == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)
        assert through["text"].strip() == recall.answer
    received = [event for event in read_trace(servers.trace) if event["event"] == "received"]
    assert len(received) == 8, "each answer came from transferred KV"
    assert all(event["failure"] is None for event in received)


def _complete(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice
