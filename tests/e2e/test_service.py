"""The whole service from a client's view: prefill TP 1 -> decode TP 2, real engines, demo model.

The service is installed from the wheel, without the checkout. One start serves all tests of this
file. The last test stops it and checks for leftovers.
"""

import asyncio
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import openai
import pytest

from connectors.protocol.agent_metadata import PROTOCOL_VERSION
from testing import browser
from testing.facts import RecallPrompt, exact, make_prompt
from testing.service_process import ROOT, ServiceProcess
from testing.sse import events
from tests.campaigns.service.world import MODEL, leaks, total, until

pytestmark = pytest.mark.engine(first=True)

IDLE_TIMEOUT_S = 60.0
SOON_S = 30.0
"""Time far below the timeouts of a request, and far above a pause of the machine."""

ATTEMPTS = 4
FACTS_FAR = 120
"""Facts of a long prompt: about 840 tokens, four chunks of prefill, several sliding windows."""


@pytest.fixture(scope="module")
def service(tmp_path_factory, installed) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("service")
    proxies = dict.fromkeys(("http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")  # nothing of a service uses them
    environment = proxies | {"VLLM_LOGGING_LEVEL": "INFO"}  # other tests of this process set WARNING
    path = str(ROOT / "testing/cpu_features") if "TANDEM_CPU_FEATURES" in os.environ else ""
    command = ("env", f"PYTHONPATH={path}", str(installed / "bin/tandem"), "run")
    config = Path("configs/local-unequal-tp.yaml")
    service = ServiceProcess(config, folder, environment=environment, command=command, cwd=installed)
    service.start()
    yield service
    service.stop()


@pytest.fixture(scope="module")
def http(service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(service) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{service.url}/v1", api_key="unused", max_retries=0, timeout=60)


def metric(http: httpx.Client, name: str, **labels: str) -> float:
    return total(str(http.base_url).rstrip("/"), name, **labels)


def wait_until_idle(http: httpx.Client) -> None:
    """Wait until both engines have no requests and all their blocks, for a limited time."""
    assert leaks(str(http.base_url).rstrip("/"), IDLE_TIMEOUT_S) == {}


def completion(prompt: object, **more: object) -> dict:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 5, "temperature": 0, **more}


def response(**more: object) -> dict:
    return {"model": MODEL, "input": "abc", "max_output_tokens": 5, "temperature": 0, **more}


def recall(seed: int, facts: int = FACTS_FAR) -> RecallPrompt:
    """Return a prompt that asks for its first fact, far outside the window of a long prompt."""
    return make_prompt(random.Random(f"e2e {seed}"), facts, distance_facts=facts - 1)


def test_the_engines_have_met_before_the_first_request(http):
    """The replica that started last has fetched a probe's KV; clients use the served model name."""
    until(lambda: metric(http, "vllm:tandem_kv_requests_total", role="decode", outcome="received"), "a probe", 120)
    assert metric(http, "tandem_requests_total", role="router") == 0
    assert metric(http, "vllm:tandem_kv_requests_total", role="decode", outcome="recomputed") == 0
    assert http.get("/health").json() == {"status": "ok", "replicas": {"prefill": 1, "decode": 1}}
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [MODEL]
    assert "<html" in http.get("/").text


def test_a_seed_outlives_a_prompt_of_several_steps(http):
    """A seeded request has equal answers with and without a prefill engine, after several steps.

    Without `vllm_cpu_worker.py`, vLLM's CPU worker dies if decode computes such a prompt: it
    samples in every step and cannot rewind the generator.
    """
    seeded = completion(recall(31).text, temperature=1.5, seed=11, max_tokens=12)
    split = http.post("/v1/completions", json=seeded).raise_for_status()
    alone = http.post("/v1/completions", json=seeded | {"echo": True}).raise_for_status()
    assert (split.headers["x-tandem-route"], alone.headers["x-tandem-route"]) == ("remote", "local")
    assert alone.json()["choices"][0]["text"] == seeded["prompt"] + split.json()["choices"][0]["text"]


def test_answers_are_right_and_their_kv_comes_from_prefill(http):
    """The fact is far outside the window, so the answer is right only if the moved blocks are."""
    wait_until_idle(http)
    labels = {"role": "decode", "source": "external_kv_transfer"}
    before, prompt_tokens = metric(http, "vllm:prompt_tokens_by_source_total", **labels), 0
    for seed in range(4):
        prompt = recall(seed)
        reply = http.post("/v1/completions", json=completion(prompt.text)).raise_for_status()
        assert reply.headers["x-tandem-route"] == "remote"
        assert exact(prompt, reply.json()["choices"][0]["text"])
        prompt_tokens += reply.json()["usage"]["prompt_tokens"]
    moved = metric(http, "vllm:prompt_tokens_by_source_total", **labels) - before
    assert moved == pytest.approx(prompt_tokens, abs=4), "decode recomputes at most each prompt's last token"


def test_openais_endpoints_through_the_sdk(http, sdk):
    """Whole and streamed answers of each endpoint are right; errors have the SDK's types.

    A stream of `/v1/responses` begins before its KV has arrived, and the prefill leg completes.
    """
    prompt = recall(10)
    ask = {"model": MODEL, "prompt": prompt.text, "max_tokens": 5, "temperature": 0}
    text = sdk.completions.create(**ask).choices[0].text
    assert exact(prompt, text)
    assert "".join(part.choices[0].text for part in sdk.completions.create(**ask, stream=True)) == text
    ask = {"model": MODEL, "messages": prompt.messages, "max_tokens": 5, "temperature": 0}
    whole = sdk.chat.completions.create(**ask)
    streamed = list(sdk.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert exact(prompt, whole.choices[0].message.content)
    parts = [part.choices[0].delta.content or "" for part in streamed if part.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert streamed[-1].usage.completion_tokens == whole.usage.completion_tokens
    done = metric(http, "tandem_prefill_legs_total", outcome="done")
    for seed in (12, 13):
        prompt = recall(seed)
        ask = {"model": MODEL, "input": prompt.messages, "max_output_tokens": 8, "temperature": 0}
        raw = sdk.responses.with_raw_response.create(**ask)
        assert raw.headers["x-tandem-route"] == "remote"
        with sdk.responses.stream(**ask) as stream:
            kinds = [event.type for event in stream]
            assert exact(prompt, stream.get_final_response().output_text)
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert exact(prompt, raw.parse().output_text)
    wait_until_idle(http)
    assert metric(http, "tandem_prefill_legs_total", outcome="done") == done + 4
    with pytest.raises(openai.NotFoundError, match="nope"):
        sdk.completions.create(model="nope", prompt="a")
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
        sdk.completions.create(model=MODEL, prompt="a", extra_body={"kv_transfer_params": {"x": 1}})


def test_a_stream_comes_in_pieces(http):
    """Events arrive one by one; vLLM joins tokens of steps that end before the last was sent."""
    body = completion("a", max_tokens=30, ignore_eos=True, stream=True, return_token_ids=True)
    with http.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        pieces = list(reply.iter_raw())
    tokens = [one["choices"][0]["token_ids"] for one in events(b"".join(pieces))]
    assert sum(map(len, tokens)) == 30
    assert len(tokens) > 20
    assert len(pieces) > 5


@pytest.mark.parametrize(
    ("more", "some", "none"),
    [
        ({"stream": True}, {"prefill_queue", "prefill", "decode_queue", "first_step"}, {"generation"}),
        ({"stream": False}, {"prefill_queue", "prefill", "first_step", "generation"}, set()),
        ({"stream": True, "n": 2, "temperature": 1}, {"prefill_queue", "prefill", "first_step"}, {"generation"}),
        ({"stream": True, "best_of": 2}, {"decode_queue", "prefill"}, {"transfer", "first_step"}),
    ],
    ids=["a stream", "a whole answer", "several choices", "a local request"],
)
def test_the_time_to_the_first_token_is_accounted_for(http, more, some, none):
    """The parts sum to the total without an unexplained part; only who asks gets them."""
    began_at = time.monotonic()
    explain = {"x-tandem-explain": "1"}
    with http.stream("POST", "/v1/completions", json=completion(recall(20).text, **more), headers=explain) as reply:
        waited_ms = (time.monotonic() - began_at) * 1000
        entries = (entry.split(";") for entry in reply.headers["server-timing"].split(", "))
        parts = {name: float(duration.removeprefix("dur=")) for name, duration in entries}
    in_all = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(in_all, abs=1)
    assert some | {"router", "slot_wait", "hops", "frontend"} <= parts.keys()
    assert not parts.keys() & (none | {"unexplained", "retries", "recompute"})
    assert 0 < in_all <= waited_ms
    assert "server-timing" not in http.post("/v1/completions", json=completion("abc")).headers


@pytest.mark.skipif(browser.CHROMIUM is None, reason="Debian's package chromium is not installed")
async def test_the_status_page_under_load(service, tmp_path):
    """A browser shows engines and requests; TANDEM_PICTURES=docs/images renews the pictures."""
    async with (
        httpx.AsyncClient(base_url=service.url, timeout=60) as client,
        browser.opened(service.url, tmp_path) as page,
    ):
        bodies = [
            completion(recall(seed, facts).text, max_tokens=60) for seed, facts in enumerate([120, 4, 60, 30] * 6)
        ]
        load = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
        await asyncio.wait(load[: len(load) // 2])
        await page.until("document.querySelectorAll('#requests tr').length > 8")
        pictures = {scheme: await page.picture(scheme) for scheme in ("light", "dark")}
        for one in await asyncio.gather(*load):
            one.raise_for_status()
        for role in ("prefill", "decode"):
            assert await page.evaluate(f"document.querySelectorAll('#{role} .replica').length") == 1
        assert "remote" in await page.evaluate("document.getElementById('requests').innerText")
        assert page.problems == []
    if folder := os.environ.get("TANDEM_PICTURES"):
        for scheme, picture in pictures.items():
            (ROOT / folder / f"status-{scheme}.png").write_bytes(picture)


def answers_to_a_stranger(port: int) -> bytes:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as stranger:
        stranger.settimeout(1)
        stranger.sendall(b"tandem/%d metadata\n" % PROTOCOL_VERSION)
        return stranger.recv(1000)
    return b""


def test_a_stranger_gets_no_metadata(service):
    """The service generates a secret; a peer without it learns only that the engines have one."""
    engines = [process for process in service.processes() if "EngineCore" in " ".join(process.cmdline())]
    # A separate process runs the side channel (docs/decisions, first contacts).
    processes = [process for engine in engines for process in (engine, *engine.children())]
    listening = [one.laddr for process in processes for one in process.net_connections("tcp") if one.status == "LISTEN"]
    for _ in range(ATTEMPTS):  # after a pause of the machine, a port seems silent
        said = [answers_to_a_stranger(address.port) for address in listening if address.ip == "127.0.0.1"]
        refusals = [text for text in said if text.startswith(b"TDE")]
        if len(refusals) == len(engines):
            break
    assert len(refusals) == len(engines) == 2
    assert all(b"secret" in text for text in refusals)
    assert not any(b"transport_metadata" in text for text in said)


def test_metrics_are_one_exposition(http):
    text = http.get("/metrics").text
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for role in ("prefill", "decode"):
        assert metric(http, "vllm:request_success_total", role=role) > 0
    assert metric(http, "tandem_requests_total", role="router", route="remote", status="200") > 0
    received = metric(http, "vllm:tandem_kv_requests_total", role="decode", outcome="received")
    assert 0 < received <= metric(http, "vllm:tandem_kv_requests_total", role="prefill", outcome="sent")
    for group in range(3):
        assert metric(http, "vllm:tandem_kv_sent_bytes_total", role="prefill", group=str(group)) > 0
    for stage in ("live", "held", "connecting", "offered", "ending"):
        assert f'stage="{stage}"' in text
    assert "vllm:tandem_kv_quarantined{" in text


@pytest.mark.parametrize("process", ["Router", "Prefill", "EngineCore", r"Worker\w*"])
def test_the_log_has_lines_of_every_process(service, process):
    assert re.search(rf"\({process} pid=\d+\) INFO [\d-]+ [\d:]+ \[\w+.py:\d+\] ", service.log)


def test_sigterm_to_the_group_drains_and_leaves_nothing(service):
    """It ends Ray's processes, actors, engine cores and workers, after the open stream."""
    names = [" ".join(process.cmdline()) for process in service.processes()]
    assert sum("EngineCore" in name for name in names) == 2
    assert sum("Worker_TP" in name for name in names) == 2
    body = completion("a", max_tokens=200, ignore_eos=True, stream=True)  # far less than `drain_s`
    with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=SOON_S) as reply:
        lines = reply.iter_lines()
        next(lines)
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(service.stop, signal.SIGTERM, group=True)
            assert "data: [DONE]" in lines
    assert stopping.result() == []
    assert "did not shut down after grace period" not in service.log
