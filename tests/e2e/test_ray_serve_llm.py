"""Ray Serve LLM's own prefill/decode application with Tandem's connector, nothing else changed."""

from __future__ import annotations

import random
import time
from pathlib import Path

import httpx
import psutil
import pytest

from app.demo.paths import MODEL_DIR
from testing import ray_llm
from testing.facts import make_prompt
from testing.ports import free_port
from testing.programs import ROOT
from testing.servers import Server
from testing.trace import read_trace
from tests.e2e.proxied import FACTS, OPTIONS, complete, running

pytestmark = [
    pytest.mark.engine(killed=True),
    pytest.mark.skipif(not (ROOT / ray_llm.PYTHON).exists(), reason=f"`make {ray_llm.PYTHON}` installs its packages"),
]

ENGINE = {"dtype": "float32", "enforce_eager": True, "block_size": 32, "max_model_len": 2048, "max_num_seqs": 16}
REPLACED_S = 240.0


def replica(process: psutil.Process, role: str) -> psutil.Process:
    """Return the process of the application's only replica of a deployment."""
    (found,) = [each for each in process.children(recursive=True) if f"{role}:demo" in " ".join(each.cmdline())]
    return found


def test_answers_are_one_engines_and_all_kv_is_transferred(tmp_path: Path) -> None:
    """Also after Serve has replaced a prefill replica. Each prompt is new and needs a transfer."""
    trace, rng = tmp_path / "trace.jsonl", random.Random(7)
    bodies = [OPTIONS | {"prompt": make_prompt(rng, facts).text} for facts in FACTS * 2]
    single = Server("single", free_port(), 1, tmp_path, None)
    with running(single):
        alone = [complete(single.url, body) for body in bodies]
    transfer = {"kv_connector": "TandemConnector", "kv_connector_extra_config": {"trace_path": str(trace)}}
    application, url = ray_llm.start(tmp_path, str(MODEL_DIR), ENGINE, transfer)

    def check(first: int, last: int) -> None:
        for body, expected in zip(bodies[first:last], alone[first:last], strict=True):
            found = complete(url, body)
            assert found["token_ids"] == expected["token_ids"]
            logprobs = found["logprobs"]["token_logprobs"]
            assert logprobs == pytest.approx(expected["logprobs"]["token_logprobs"], abs=1e-4)
        received = [event["failure"] for event in read_trace(trace) if event["event"] == "received"]
        assert received == [None] * last

    try:
        check(0, 8)
        replica(psutil.Process(application.process.pid), "Prefill").kill()
        give_up_at = time.monotonic() + REPLACED_S
        # Without KV to transfer: all its blocks are in decode's prefix cache.
        known = bodies[1]
        while httpx.post(f"{url}/v1/completions", json=known, timeout=REPLACED_S).status_code != 200:
            assert time.monotonic() < give_up_at, "Serve has not replaced the prefill replica"
            time.sleep(1)
        check(8, 16)
    finally:
        application.stop()
