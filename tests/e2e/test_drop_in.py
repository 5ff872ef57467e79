"""Two stock vLLM servers with Tandem's connector behind a proxy.

vLLM starts the decode server's processes itself, by `spawn`; those of other tests are forked.
"""

from __future__ import annotations

import random
from pathlib import Path

import psutil
import pytest

from testing.facts import make_prompt
from testing.ports import free_port
from testing.servers import Server
from testing.trace import read_trace
from tests.e2e.proxied import FACTS, OPTIONS, complete, proxied

pytestmark = pytest.mark.engine


def test_the_proxy_answers_as_one_engine_does(tmp_path: Path) -> None:
    """Text, tokens and logprobs equal one engine's; all KV was transferred.

    The end of a server's API process ends its engine and workers.
    """
    trace, rng = tmp_path / "trace.jsonl", random.Random(7)
    connector = {
        "kv_connector": "TandemConnector",
        "kv_connector_module_path": "connectors.vllm_hma.connector",
        "kv_connector_extra_config": {"trace_path": str(trace)},
    }
    prefill, decode = (
        Server(role, free_port(), 1, tmp_path, connector | {"kv_role": role}, forked=role == "kv_producer")
        for role in ("kv_producer", "kv_consumer")
    )
    with proxied(tmp_path, prefill, decode) as url:
        for facts in FACTS:
            recall = make_prompt(rng, facts)
            alone, through = (complete(each, OPTIONS | {"prompt": recall.text}) for each in (decode.url, url))
            assert through["token_ids"] == alone["token_ids"]
            logprobs = through["logprobs"]["token_logprobs"]
            assert logprobs == pytest.approx(alone["logprobs"]["token_logprobs"], abs=1e-4)
            assert through["text"].strip() == recall.answer
        received = [event["failure"] for event in read_trace(trace) if event["event"] == "received"]
        assert received == [None] * len(FACTS)
        family = prefill.api.children(recursive=True)
        prefill.api.kill()
        assert psutil.wait_procs(family, timeout=30)[1] == []
