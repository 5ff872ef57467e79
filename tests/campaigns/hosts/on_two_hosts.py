"""Prefill and decode on two hosts, the link between them cut and restored: `make two-hosts-test`.

Needs root. One service for all tests, in this order; the last ones lose the prefill host and get it
back.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from app.http.routes import OPEN_AGE_S
from testing.facts import RecallPrompt, exact, make_prompt
from testing.service_process import write_config
from tests.campaigns.hosts.two_hosts import BACK, TwoHosts, two_hosts

MODEL = "tandem-demo"
RATE = "800mbit"
FACTS_FAR = 120
"""Facts of a long prompt: about 840 tokens, four chunks of prefill, several sliding windows."""

CLIENTS = 6
CUT_S = 5.0
REQUEST_TIMEOUT_S = 60.0
BOUND_S = REQUEST_TIMEOUT_S + 10
IDLE_TIMEOUT_S = 60.0
LOST_TIMEOUT_S = 180.0

TRANSFER = {"progress_s": 15.0, "alive_s": 2.0, "cancel_s": 2.0, "node_lost_s": 60.0}
ROUTER = {"request_timeout_s": REQUEST_TIMEOUT_S, "prefill_timeout_s": 25.0}
RAY = {
    # GCS: a node is dead after this number of checks without an answer. It must survive CUT_S.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
    # A node: a connection without traffic for this time is broken, and without GCS for this time
    # the node ends itself. Until then its engines may write, so node_lost_s must be longer than the
    # two, less the time of GCS.
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "8",
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("two-hosts")
    config = write_config("two-hosts.yaml", folder, transfer=TRANSFER, router=ROUTER)
    with two_hosts(config, RATE, **RAY) as service:
        yield service


@dataclass
class Load:
    """Streaming clients, each with one question after the other; ``ends`` counts the outcomes of
    their requests.
    """

    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    async def client(self, http: httpx.AsyncClient, name: str, stop: asyncio.Event) -> None:
        number = 0
        while not stop.is_set():
            number += 1
            prompt = recall(f"{name} {number}")
            began = time.monotonic()
            end = await self._ask(http, prompt)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self.ends[end] += 1

    async def _ask(self, http: httpx.AsyncClient, prompt: RecallPrompt) -> str:
        body = {"model": MODEL, "prompt": prompt.text, "max_tokens": 5, "temperature": 0, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as reply:
            text = (await reply.aread()).decode()
        if reply.status_code != 200:
            return str(reply.status_code)
        # A stream that waits long for its first token has comments.
        events = [line.removeprefix("data: ") for line in text.splitlines() if line and not line.startswith(":")]
        if events[-1] != "[DONE]":
            return "error event" if '"error"' in events[-1] else self._note(f"broke off: {text[-300:]!r}")
        answer = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        if not exact(prompt, answer) and answer != await alone(http, body):
            return self._note(f"{answer!r} instead of {prompt.answer!r}")
        # The headers of a stream that waits long for its first token are sent before its route.
        return reply.headers.get("x-tandem-route", "no route yet")

    def _note(self, wrong: str) -> str:
        self.wrong.append(wrong)
        return "wrong"


@asynccontextmanager
async def load(service: TwoHosts, name: str) -> AsyncIterator[Load]:
    """Run clients meanwhile; at the end each completes its last request."""
    stop, result = asyncio.Event(), Load()
    async with httpx.AsyncClient(base_url=service.url, timeout=BOUND_S) as http:
        clients = [asyncio.create_task(result.client(http, f"{name} {i}", stop)) for i in range(CLIENTS)]
        try:
            yield result
        finally:
            stop.set()
            await asyncio.gather(*clients)


def recall(seed: str) -> RecallPrompt:
    """A prompt whose asked fact is the first: far outside the sliding window."""
    return make_prompt(random.Random(seed), FACTS_FAR, distance_facts=FACTS_FAR - 1)


def metric(service: TwoHosts, name: str, **labels: str) -> float:
    """Return the current sum of the samples of ``name`` with ``labels``."""
    return sample_sum(exposition(service), name, **labels)


def exposition(service: TwoHosts) -> str:
    """Return current metrics, not a cached response."""
    time.sleep(OPEN_AGE_S)  # the router returns a cached response for this time
    return httpx.get(f"{service.url}/metrics", timeout=30).text


def sample_sum(text: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of ``name`` with ``labels``."""
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line)
        if match and match[1] == name and all(f'{key}="{value}"' in match[2] for key, value in labels.items()):
            total += float(match[3])
    return total


def busy(service: TwoHosts) -> dict[str, float]:
    """Return the metrics that are zero on an idle service, of all engines that answer."""
    engine = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    names = (*(f"vllm:{name}" for name in engine), "vllm:tandem_kv_quarantined")
    text = exposition(service)
    return {name: value for name in names if (value := sample_sum(text, name))}


async def wait_until(what: str, condition, within_s: float) -> None:
    give_up_at = time.monotonic() + within_s
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < give_up_at, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.5)


async def wait_until_idle(service: TwoHosts) -> None:
    await wait_until("both pools at their baseline", lambda: not busy(service), IDLE_TIMEOUT_S)


@dataclass
class Asked:
    """Return right answers, by route, and the tokens of their prompts."""

    routes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0


async def alone(http: httpx.AsyncClient, body: dict[str, object]) -> str:
    """Return the answer of decode alone: the model does not always recall the fact."""
    reply = await http.post("/v1/completions", json={**body, "stream": False, "prompt_logprobs": 0})
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-tandem-route"] == "local"
    return str(reply.json()["choices"][0]["text"])


async def ask(service: TwoHosts, name: str, count: int) -> Asked:
    """Ask some questions one after the other; each answer must be right."""
    asked = Asked()
    async with httpx.AsyncClient(base_url=service.url, timeout=BOUND_S) as http:
        for number in range(count):
            prompt = recall(f"{name} {number}")
            body = {"model": MODEL, "prompt": prompt.text, "max_tokens": 5, "temperature": 0}
            reply = await http.post("/v1/completions", json=body)
            assert reply.status_code == 200, reply.text
            text = reply.json()["choices"][0]["text"]
            assert exact(prompt, text) or text == await alone(http, body), f"{text!r} for {prompt.answer!r}"
            asked.routes[reply.headers["x-tandem-route"]] += 1
            asked.prompt_tokens += reply.json()["usage"]["prompt_tokens"]
    return asked


async def engines_end(service: TwoHosts) -> float:
    """Wait until the last process of an engine or its actor on prefill's host has ended."""
    await wait_until("prefill's engine has ended", lambda: not engine_runs(service), LOST_TIMEOUT_S)
    return time.monotonic()


def engine_runs(service: TwoHosts) -> bool:
    """Return whether prefill's host has a process of an engine or its actor."""
    return re.search("VLLM|EngineCore|ray::ServeReplica", " ".join(service.back.running())) is not None


def is_remote(service: TwoHosts) -> bool:
    """Return whether prefill serves one more request."""
    return asyncio.run(ask(service, f"one {time.monotonic()}", 1)).routes["remote"] == 1


def crossed_bytes(service: TwoHosts) -> int:
    """Return the bytes that prefill's host has sent into its port so far."""
    shown = service.switch.output("ip", "-json", "-statistics", "link", "show", BACK)
    return json.loads(shown)[0]["stats64"]["rx"]["bytes"]


async def test_kv_crosses_the_link(service):
    """Right answers, all prompt tokens from prefill, and their bytes through the switch only."""
    labels = {"role": "decode", "source": "external_kv_transfer"}
    tokens = metric(service, "vllm:prompt_tokens_by_source_total", **labels)
    sent, crossed = metric(service, "vllm:tandem_kv_sent_bytes_total"), crossed_bytes(service)
    asked = await ask(service, "first", 6)
    assert asked.routes == {"remote": 6}
    await wait_until_idle(service)
    moved = metric(service, "vllm:prompt_tokens_by_source_total", **labels) - tokens
    assert moved == asked.prompt_tokens - 6, "decode computes each prompt's last token"
    sent = metric(service, "vllm:tandem_kv_sent_bytes_total") - sent
    assert sent > 10**6
    assert crossed_bytes(service) - crossed > sent


async def test_a_link_that_is_cut_and_mended(service):
    """No answer is wrong, every request ends in time, nothing leaks, and prefill is used again."""
    async with load(service, "cut") as clients:
        await wait_until("clients are being served", lambda: clients.ends["remote"] >= CLIENTS, BOUND_S)
        service.switch.cut(BACK)
        await asyncio.sleep(CUT_S)
        service.switch.mend(BACK)
        await asyncio.sleep(CUT_S)
    print(f"\ncut for {CUT_S:g} s: {dict(clients.ends)}, slowest {clients.slowest_s:.1f} s")
    assert not clients.wrong
    assert clients.slowest_s < BOUND_S
    await wait_until_idle(service)
    await wait_until("prefill is used again", lambda: is_remote(service), 30)
    assert (await ask(service, "again", 6)).routes == {"remote": 6}
    assert metric(service, "vllm:tandem_kv_quarantined") == 0


async def test_a_link_that_is_cut_for_good(service):
    """Decode serves alone, and keeps blocks in quarantine until Ray's report: by then prefill
    has ended.
    """
    async with load(service, "good") as clients:
        await wait_until("clients are being served", lambda: clients.ends["remote"] >= CLIENTS, BOUND_S)
        service.switch.cut(BACK)
        began = time.monotonic()
        gone = asyncio.create_task(engines_end(service))
        await wait_until("blocks are in quarantine", lambda: metric(service, "vllm:tandem_kv_quarantined") > 0, BOUND_S)
        after_s = time.monotonic() - began
    print(f"\ncut for good: {dict(clients.ends)}, slowest {clients.slowest_s:.1f} s, quarantine at {after_s:.0f} s")
    assert not clients.wrong
    assert clients.slowest_s < BOUND_S
    assert (await ask(service, "alone", 6)).routes == {"local": 6}

    await wait_until("quarantine is over", lambda: not metric(service, "vllm:tandem_kv_quarantined"), LOST_TIMEOUT_S)
    freed_s = time.monotonic() - began
    could_write = await asyncio.to_thread(engine_runs, service)
    assert not could_write, f"freed after {freed_s:.0f} s, while prefill's engine ran: {service.back.running()}"
    print(f"prefill's processes ended after {await gone - began:.0f} s, quarantine after {freed_s:.0f} s")
    await wait_until_idle(service)


async def test_the_host_comes_back(service):
    """A new Ray node there gets a new prefill engine, with a new handshake."""
    service.switch.mend(BACK)
    await asyncio.to_thread(service.start_back)
    await wait_until("a new prefill engine is used", lambda: is_remote(service), 120)
    assert (await ask(service, "as before", 6)).routes == {"remote": 6}
    await wait_until_idle(service)
