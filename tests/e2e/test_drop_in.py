"""Two stock vLLM servers with Tandem's connector, no Ray, behind a plain sequential proxy: one engine's answers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from app.demo.facts import make_prompt
from app.demo.paths import MODEL_DIR
from tests.e2e.engines import ENVIRONMENT
from tests.e2e.service_process import free_port

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Servers:
    """Base URLs, and the file in which both engines trace their transfers."""

    decode: str
    proxy: str
    trace: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """``vllm serve`` twice, started as its module because the CPU build's command does not start, and the proxy."""
    folder = tmp_path_factory.mktemp("drop-in")
    trace = folder / "trace.jsonl"
    prefill, decode, proxy = (free_port() for _ in range(3))
    started = [_vllm(folder, "kv_producer", prefill, trace), _vllm(folder, "kv_consumer", decode, trace)]
    try:
        for port, process in zip((prefill, decode), started, strict=True):
            _wait_healthy(f"http://127.0.0.1:{port}/health", process, folder)
        urls = [f"http://127.0.0.1:{port}" for port in (prefill, decode)]
        command = ["tests.e2e.sequential_proxy", "--prefill", urls[0], "--decode", urls[1], "--port", str(proxy)]
        started.append(_module(folder, "proxy", command))
        _wait_healthy(f"http://127.0.0.1:{proxy}/docs", started[-1], folder)
        yield Servers(urls[1], f"http://127.0.0.1:{proxy}", trace)
    finally:
        family = [p for process in started for p in (psutil.Process(process.pid), *_children(process.pid))]
        for process in started:
            process.terminate()
        _, left = psutil.wait_procs(family, timeout=30)
        for orphan in left:
            orphan.kill()


def test_the_proxy_answers_as_one_engine_does(servers: Servers) -> None:
    """Same text, tokens and logprobs, and the right recall, for prompts of one to many blocks."""
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
    received = [event for event in _events(servers.trace) if event["event"] == "received"]
    assert len(received) == 8, "each answer came from transferred KV"
    assert all(event["failure"] is None for event in received)


def _complete(url: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def _vllm(folder: Path, role: str, port: int, trace: Path) -> subprocess.Popen[bytes]:
    transfer = {
        "kv_connector": "TandemConnector",
        "kv_connector_module_path": "connectors.vllm_hma.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"trace_path": str(trace)},
    }
    arguments = [
        "vllm.entrypoints.openai.api_server",
        *("--model", str(MODEL_DIR), "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port)),
        *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-batched-tokens", "256"),
        *("--max-model-len", "2048", "--max-num-seqs", "16", "--no-enable-prefix-caching"),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    return _module(folder, role, arguments)


def _module(folder: Path, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env=os.environ | ENVIRONMENT,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _wait_healthy(url: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    give_up_at = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            break
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    logs = "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in folder.glob("*.log"))
    raise RuntimeError(f"{url} is not there:\n{logs}")


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _events(trace: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in trace.read_text().splitlines()]
