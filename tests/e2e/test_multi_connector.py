"""vLLM's MultiConnector over TandemConnector and ExampleConnector, in stock servers behind a proxy.

ExampleConnector stores a prompt's blocks with its first chunk, so prompts are shorter than a chunk.
``tests/vllm_contract/test_tandem_multi_connector.py`` has TandemMultiConnector's choices.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from testing.facts import make_prompt
from testing.ports import free_port
from testing.servers import Server
from tests.e2e.proxied import OPTIONS, complete, proxied, running

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


def answer(url: str, prompt: str, max_tokens: int = 6) -> str:
    return str(complete(url, OPTIONS | {"prompt": prompt, "max_tokens": max_tokens})["text"])


def counted(server: Server) -> dict[str, float]:
    """Return the connector's samples by name and own label; an idle engine reports with a step."""
    answer(server.url, "a=1\na?", 4)
    found: dict[str, float] = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=30).text.splitlines():
        if match := re.match(r"vllm:tandem_kv_(\w+)\{(.*)\} ([0-9.e+-]+)$", line):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2]))
            own = [value for key, value in labels.items() if key not in ("engine", "model_name")]
            found["/".join([match[1], *own])] = float(match[3])
    return found


def test_metrics_account_for_every_request(tmp_path: Path) -> None:
    """Answers are those of a server without a connector; a prompt that both have is Tandem's."""
    rng, plain = random.Random(1), Server("plain", free_port(), 1, tmp_path, None)
    with running(plain):
        prompts = [make_prompt(rng, rng.randint(6, 20)).text for _ in range(PROMPTS)]
        answers = {prompt: answer(plain.url, prompt) for prompt in prompts}
    prefill, decode = (
        Server(role, free_port(), 1, tmp_path, connectors(role, tmp_path), {"VLLM_LOGGING_LEVEL": "INFO"})
        for role in ("kv_producer", "kv_consumer")
    )
    with proxied(tmp_path, prefill, decode) as proxy:
        for _ in range(2):
            assert {prompt: answer(proxy, prompt) for prompt in answers} == answers
        sent, received = counted(prefill), counted(decode)
        assert "Inject KV cache of" not in decode.log.read_text(errors="replace"), "ExampleConnector has loaded one"
    assert any(any(file.iterdir()) for file in (tmp_path / "stored").glob("*/*")), "ExampleConnector has stored none"
    assert sent["requests_total/sent"] == received["requests_total/received"] == 2 * PROMPTS
    assert not received.get("requests_total/recomputed")
    assert not sent.get("writes_total/failed")
    assert not any(value for each in (sent, received) for key, value in each.items() if key.startswith("transfers/"))
    assert any(value for key, value in sent.items() if key.startswith(("sent_bytes_total", "pair_bytes_total")))
