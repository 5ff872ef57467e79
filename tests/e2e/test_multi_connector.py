"""vLLM's MultiConnector over TandemConnector and ExampleConnector, in stock servers behind a proxy.

ExampleConnector stores a prompt's blocks with its first chunk, so prompts are shorter than a chunk.
``tests/vllm_contract/test_tandem_multi_connector.py`` has TandemMultiConnector's choices.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from testing.facts import make_prompt
from testing.ports import free_port
from testing.servers import Server
from testing.vllm_server import start_module, stop, wait_until_up

pytestmark = pytest.mark.engine
PROMPTS = 12


def connectors(role: str, folder: Path) -> dict[str, Any]:
    tandem = {"kv_connector": "TandemConnector", "kv_connector_module_path": "connectors.vllm_hma.connector"}
    tandem |= {"kv_role": role, "kv_load_failure_policy": "recompute"}
    stored = {"shared_storage_path": str(folder / "stored" / role)}
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": stored}
    both = {"connectors": [tandem, example]}
    config = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": both}
    return config | {"kv_load_failure_policy": "recompute"}


@contextmanager
def servers(folder: Path) -> Iterator[tuple[Server, Server, str]]:
    """Start a prefill server, a decode server and the proxy, whose URL is the last part."""
    pair = [
        Server(role, free_port(), 1, folder, connectors(role, folder), {"VLLM_LOGGING_LEVEL": "INFO"})
        for role in ("kv_producer", "kv_consumer")
    ]
    proxies, port = [], free_port()
    try:
        for server in pair:
            server.start()
        for server in pair:
            server.wait_until_up()
        words = ["testing.sequential_proxy", "--prefill", pair[0].url, "--decode", pair[1].url, "--port", str(port)]
        proxies.append(start_module(folder, "proxy", words))
        wait_until_up(f"http://127.0.0.1:{port}/docs", proxies[0], folder)
        yield pair[0], pair[1], f"http://127.0.0.1:{port}"
    finally:
        stop(proxies)
        for server in pair:
            server.destroy()


def complete(url: str, prompt: str, max_tokens: int = 6) -> str:
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
    return str(reply.json()["choices"][0]["text"])


def plain_answers(folder: Path) -> dict[str, str]:
    """Return the answers of a server without a connector, by prompt."""
    rng, server = random.Random(1), Server("plain", free_port(), 1, folder, None)
    try:
        server.start()
        server.wait_until_up()
        prompts = [make_prompt(rng, rng.randint(6, 20)).text for _ in range(PROMPTS)]
        return {prompt: complete(server.url, prompt) for prompt in prompts}
    finally:
        server.destroy()


def counted(server: Server) -> dict[str, float]:
    """Return the connector's samples by name and own label; an idle engine reports with a step."""
    complete(server.url, "a=1\na?", 4)
    found: dict[str, float] = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        if match := re.match(r"vllm:tandem_kv_(\w+)\{(.*)\} ([0-9.e+-]+)$", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            own = [value for key, value in labels.items() if key not in ("engine", "model_name")]
            found["/".join([match[1], *own])] = float(match[3])
    return found


def test_metrics_account_for_every_request(tmp_path: Path) -> None:
    """Answers are those of a server without a connector; a prompt that both have is Tandem's."""
    answers = plain_answers(tmp_path)
    with servers(tmp_path) as (prefill, decode, proxy):
        for _ in range(2):
            assert {prompt: complete(proxy, prompt) for prompt in answers} == answers
        sent, received = counted(prefill), counted(decode)
        assert "Inject KV cache of" not in decode.log.read_text(errors="replace"), "ExampleConnector has loaded one"
    assert any(any(file.iterdir()) for file in (tmp_path / "stored").glob("*/*")), "ExampleConnector has stored none"
    assert sent["requests_total/sent"] == received["requests_total/received"] == 2 * PROMPTS
    assert not received.get("requests_total/recomputed")
    assert not sent.get("writes_total/failed")
    assert not any(value for each in (sent, received) for key, value in each.items() if key.startswith("transfers/"))
    assert any(value for key, value in sent.items() if key.startswith(("sent_bytes_total", "pair_bytes_total")))
