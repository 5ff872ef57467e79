"""Two stock vLLM servers with Tandem's connector behind a plain sequential proxy, without Ray.

vLLM starts the decode server's processes itself, by `spawn`; those of other tests are forked.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from testing.facts import make_prompt
from testing.ports import free_port
from testing.servers import Server
from testing.trace import read_trace
from testing.vllm_server import start_module, stop, wait_until_up

pytestmark = pytest.mark.engine


def tandem(role: str, trace: Path) -> dict[str, Any]:
    """Return ``--kv-transfer-config`` of a stock server."""
    return {
        "kv_connector": "TandemConnector",
        "kv_connector_module_path": "connectors.vllm_hma.connector",
        "kv_role": role,
        "kv_connector_extra_config": {"trace_path": str(trace)},
    }


def complete(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
    return dict(answer.json()["choices"][0])


def test_the_proxy_answers_as_one_engine_does(tmp_path: Path) -> None:
    """Text, tokens and logprobs equal one engine's for 1 to many blocks; all KV was transferred.

    The end of a server's API process ends its engine and workers.
    """
    trace, rng, proxies, port = tmp_path / "trace.jsonl", random.Random(7), [], free_port()
    prefill, decode = servers = [
        Server(role, free_port(), 1, tmp_path, tandem(role, trace), forked=role == "kv_producer")
        for role in ("kv_producer", "kv_consumer")
    ]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait_until_up()
        words = ["testing.sequential_proxy", "--prefill", prefill.url, "--decode", decode.url, "--port", str(port)]
        proxies.append(start_module(tmp_path, "proxy", words))
        wait_until_up(f"http://127.0.0.1:{port}/docs", proxies[0], tmp_path)
        for facts in (1, 5, 20, 21, 40, 80, 120, 160):
            recall = make_prompt(rng, facts)
            body = {"model": "demo", "prompt": recall.text, "max_tokens": 6, "temperature": 0, "logprobs": 2}
            body["return_token_ids"] = True
            alone, through = complete(decode.url, body), complete(f"http://127.0.0.1:{port}", body)
            assert through["token_ids"] == alone["token_ids"]
            logprobs = through["logprobs"]["token_logprobs"]
            assert logprobs == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)
            assert through["text"].strip() == recall.answer
        received = [event["failure"] for event in read_trace(trace) if event["event"] == "received"]
        assert received == [None] * 8
        family = prefill.api.children(recursive=True)
        prefill.api.kill()
        assert psutil.wait_procs(family, timeout=30)[1] == []
    finally:
        stop(proxies)
        for server in servers:
            server.destroy()
