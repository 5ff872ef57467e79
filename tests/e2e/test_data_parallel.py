"""Two stock vLLM servers, one with two data-parallel ranks: each rank is an engine of its own
for the connector.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from testing.facts import make_prompt
from testing.ports import free_port
from testing.sequential_proxy import PRODUCE
from testing.servers import Server
from testing.trace import read_trace
from tests.e2e.test_drop_in import tandem

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif("TANDEM_DATA_PARALLEL" not in os.environ, reason="takes a minute: `make data-parallel`"),
]


@dataclass(frozen=True)
class Servers:
    """A prefill server with two ranks, a decode server, and the file in which both trace their
    transfers.
    """

    prefill: Server
    decode: Server
    trace: Path


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("data-parallel")
    trace = folder / "trace.jsonl"
    prefill = Server("prefill", free_port(), 1, folder, tandem("kv_producer", trace), data_parallel_size=2)
    decode = Server("decode", free_port(), 1, folder, tandem("kv_consumer", trace))
    try:
        for server in (prefill, decode):
            server.start()
        for server in (prefill, decode):
            server.wait_until_up()
        yield Servers(prefill, decode, trace)
    finally:
        for server in (prefill, decode):
            server.destroy()


def test_kv_of_each_rank_gives_one_engines_answers(servers: Servers) -> None:
    """vLLM's own header selects a rank; each rank has its own engine id and side channel."""
    rng = random.Random(11)
    addresses: dict[int, set[tuple[str, int]]] = {0: set(), 1: set()}
    for index, facts in enumerate((1, 5, 21, 40, 80, 160)):
        recall, rank = make_prompt(rng, facts), index % 2
        body = {"model": "demo", "prompt": recall.text, "max_tokens": 6, "temperature": 0, "logprobs": 2}
        alone = _complete(servers.decode, body)
        leg = body | {"max_tokens": 1, "kv_transfer_params": PRODUCE}
        params = _complete(servers.prefill, leg, {"X-data-parallel-rank": str(rank)})["kv_transfer_params"]
        addresses[rank].add((params["remote_engine_id"], params["remote_port"]))
        answer = _complete(servers.decode, body | {"kv_transfer_params": params})
        (alone_choice,), (choice,) = alone["choices"], answer["choices"]
        assert choice["text"] == alone_choice["text"]
        assert choice["text"].strip() == recall.answer
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(
            alone_choice["logprobs"]["token_logprobs"], abs=1e-4
        )
    assert [len(addresses[rank]) for rank in (0, 1)] == [1, 1]
    assert not addresses[0] & addresses[1]
    received = [event for event in read_trace(servers.trace) if event["event"] == "received"]
    assert [event["failure"] for event in received] == [None] * 6, "each answer came from transferred KV"


def test_no_process_outlives_a_killed_server(servers: Servers) -> None:
    """vLLM's coordinator of the ranks does not watch its parent; the connector's watchdog does."""
    api = servers.prefill.api
    family = api.children(recursive=True)
    assert len(family) >= 5, "two engine cores, their workers, and the coordinator"
    api.kill()
    _, left = psutil.wait_procs(family, timeout=30)
    assert left == []


def _complete(server: Server, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())
