"""The whole service from a client's view: prefill TP 1 -> decode TP 2, real engines, demo model.

One start serves all tests of this file. The last test stops the service and checks for leftovers.
"""

import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx
import openai
import pytest

from actors.engine.pair_warmup import WARM_UP_INTERVAL_S, probe_timeout_s
from app.http.routes import OPEN_AGE_S
from configs.settings.kv import TransferSettings
from connectors.protocol.agent_metadata import PROTOCOL_VERSION
from testing import browser
from testing.facts import RecallPrompt, exact, make_prompt
from testing.service_process import ROOT, ServiceProcess, write_config
from testing.timing import server_timing
from tests.campaigns.fuzz.http import attack, check

pytestmark = pytest.mark.engine(first=True)

MODEL = "tandem-demo"
TURN = [{"role": "user", "content": "hello"}]
IDLE_TIMEOUT_S = 60.0
SOON_S = 30.0
"""Time far below the timeouts of a request, and far above a pause of the machine."""

ATTEMPTS = 4
FACTS_FAR = 120
"""Facts of a long prompt: about 840 tokens, four chunks of prefill, several sliding windows."""


@pytest.fixture(scope="module")
def service(tmp_path_factory) -> Iterator[ServiceProcess]:
    folder = tmp_path_factory.mktemp("service")
    proxies = dict.fromkeys(("http_proxy", "ALL_PROXY"), "http://127.0.0.1:9")  # nothing of a service uses them
    environment = proxies | {"VLLM_LOGGING_LEVEL": "INFO"}  # other tests of this process set WARNING
    service = ServiceProcess(write_config("local-unequal-tp.yaml", folder), folder, environment=environment)
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
    """Return the current sum of the samples of `name` with `labels`."""
    return sample_sum(exposition(http), name, **labels)


def exposition(http: httpx.Client) -> str:
    """Return current metrics, not a cached response."""
    time.sleep(OPEN_AGE_S)  # the router returns a cached response for this time
    return http.get("/metrics").text


def sample_sum(text: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of `name` with `labels` in `text`."""
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(r"([\w:]+)\{(.*)\} (\S+)", line)
        if match and match[1] == name and all(f'{key}="{value}"' in match[2] for key, value in labels.items()):
            total += float(match[3])
    return total


def busy(http: httpx.Client) -> dict[str, float]:
    """Return the metrics that must be zero on an idle service: requests and blocks of both
    engines.
    """
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    text = exposition(http)
    found = {f"{role} {name}": sample_sum(text, name, role=role) for role in ("prefill", "decode") for name in names}
    return {name: value for name, value in found.items() if value}


def wait_until_idle(http: httpx.Client) -> None:
    """Wait until both engines have no requests and all their blocks, for a limited time."""
    give_up_at = time.monotonic() + IDLE_TIMEOUT_S
    while left := busy(http):
        assert time.monotonic() < give_up_at, f"still busy after {IDLE_TIMEOUT_S} s: {left}"
        time.sleep(0.2)


def sse(text: str) -> list[dict]:
    """Return the events of a stream, which must end in [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def completion(prompt: object, **more: object) -> dict:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 5, "temperature": 0, **more}


def response(**more: object) -> dict:
    return {"model": MODEL, "input": "abc", "max_output_tokens": 5, "temperature": 0, **more}


def recall(seed: int, facts: int = FACTS_FAR) -> RecallPrompt:
    """Return a prompt that asks for its first fact, far outside the sliding window of a long
    prompt.
    """
    return make_prompt(random.Random(f"e2e {seed}"), facts, distance_facts=facts - 1)


def test_health_and_models(http):
    """Both roles answer; clients use the served model name."""
    assert http.get("/health").json() == {"status": "ok", "replicas": {"prefill": 1, "decode": 1}}
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [MODEL]


def test_the_engines_have_met_before_the_first_request(http):
    """The replica that started last has fetched a probe's KV, so no client waits for first
    contact.
    """
    give_up_at = time.monotonic() + 2 * WARM_UP_INTERVAL_S + probe_timeout_s(TransferSettings())
    while not metric(http, "vllm:tandem_kv_requests_total", role="decode", outcome="received"):
        assert time.monotonic() < give_up_at
        time.sleep(0.5)
    assert metric(http, "tandem_requests_total", role="router") == 0
    assert metric(http, "vllm:tandem_kv_requests_total", role="decode", outcome="recomputed") == 0


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
    before = metric(http, "vllm:prompt_tokens_by_source_total", **labels)
    prompt_tokens = 0
    for seed in range(4):
        prompt = recall(seed)
        reply = http.post("/v1/completions", json=completion(prompt.text))
        assert reply.status_code == 200
        assert reply.headers["x-tandem-route"] == "remote"
        assert exact(prompt, reply.json()["choices"][0]["text"])
        prompt_tokens += reply.json()["usage"]["prompt_tokens"]
    moved = metric(http, "vllm:prompt_tokens_by_source_total", **labels) - before
    assert moved == pytest.approx(prompt_tokens, abs=4), "decode recomputes at most each prompt's last token"


def test_completions_through_the_sdk(sdk):
    """Complete and streamed answers have the same text."""
    prompt = recall(10, facts=40)
    whole = sdk.completions.create(model=MODEL, prompt=prompt.text, max_tokens=5, temperature=0)
    parts = sdk.completions.create(model=MODEL, prompt=prompt.text, max_tokens=5, temperature=0, stream=True)
    assert exact(prompt, whole.choices[0].text)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


def test_chat_through_the_sdk(sdk):
    """Chat answers through the template have the same text."""
    prompt = recall(11, facts=40)
    ask = {"model": MODEL, "messages": prompt.messages, "max_tokens": 5, "temperature": 0}
    whole = sdk.chat.completions.create(**ask)
    parts = sdk.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    streamed = list(parts)
    text = "".join(part.choices[0].delta.content or "" for part in streamed if part.choices)
    assert exact(prompt, whole.choices[0].message.content)
    assert text == whole.choices[0].message.content
    assert streamed[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_responses_through_the_sdk(http, sdk):
    """`/v1/responses` is split like a chat.

    A stream begins before its KV has arrived, and the prefill leg still completes.
    """
    wait_until_idle(http)
    before = metric(http, "tandem_prefill_legs_total", outcome="done")
    recomputed = metric(http, "vllm:tandem_kv_requests_total", role="decode", outcome="recomputed")
    for seed in range(12, 15):
        prompt = recall(seed)
        ask = {"model": MODEL, "input": prompt.messages, "max_output_tokens": 8, "temperature": 0}
        whole = sdk.responses.with_raw_response.create(**ask)
        assert whole.headers["x-tandem-route"] == "remote"
        with sdk.responses.stream(**ask) as stream:
            kinds = [event.type for event in stream]
            assert exact(prompt, stream.get_final_response().output_text)
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert exact(prompt, whole.parse().output_text)
    wait_until_idle(http)
    assert metric(http, "tandem_prefill_legs_total", outcome="done") == before + 6
    assert metric(http, "vllm:tandem_kv_requests_total", role="decode", outcome="recomputed") == recomputed


def test_messages(http):
    """Requests of Anthropic's API, streamed or not, are split like chats and answered right."""
    prompt = recall(15)
    ask = {"model": MODEL, "messages": prompt.messages, "max_tokens": 8, "temperature": 0}
    whole = http.post("/v1/messages", json=ask)
    assert whole.headers["x-tandem-route"] == "remote"
    assert exact(prompt, whole.json()["content"][0]["text"])
    streamed = http.post("/v1/messages", json=ask | {"stream": True})
    assert streamed.headers["x-tandem-route"] == "remote"
    said = [json.loads(line.removeprefix("data: ")) for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert (said[0]["type"], said[-1]["type"]) == ("message_start", "message_stop")
    assert exact(prompt, "".join(one["delta"]["text"] for one in said if one["type"] == "content_block_delta"))
    counted = http.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": prompt.messages}).json()
    assert counted["input_tokens"] == whole.json()["usage"]["input_tokens"]


def test_tokens(http):
    """Tokenize and detokenize a text and a chat."""
    tokens = http.post("/tokenize", json={"model": MODEL, "prompt": "mira=427"}).json()["tokens"]
    assert http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json()["prompt"].endswith("mira=427")
    chat = http.post("/tokenize", json={"model": MODEL, "messages": TURN}).json()
    assert chat["count"] == len(chat["tokens"]) > len("hello")


def test_a_stream_comes_in_pieces(http):
    """Events arrive one by one, as server-sent events, with an end mark.

    vLLM joins the tokens of steps that end before the last event was sent.
    """
    with http.stream(
        "POST",
        "/v1/completions",
        json=completion("a", max_tokens=30, ignore_eos=True, stream=True, return_token_ids=True),
    ) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-tandem-route"] == "remote"
        pieces = list(reply.iter_raw())
    tokens = [one["choices"][0]["token_ids"] for one in sse(b"".join(pieces).decode())]
    assert sum(map(len, tokens)) == 30
    assert len(tokens) > 20
    assert len(pieces) > 5


@pytest.mark.parametrize(
    ("more", "most", "none"),
    [
        ({"stream": True}, {"prefill_queue", "prefill", "decode_queue", "first_step"}, {"generation"}),
        ({"stream": False}, {"prefill_queue", "prefill", "first_step", "generation"}, set()),
        ({"stream": True, "n": 2, "temperature": 1}, {"prefill_queue", "prefill", "first_step"}, {"generation"}),
        ({"stream": True, "best_of": 2}, {"decode_queue", "prefill"}, {"transfer", "first_step"}),
    ],
    ids=["a stream", "a whole answer", "several choices", "a local request"],
)
def test_the_time_to_the_first_token_is_accounted_for(http, more, most, none):
    """The parts sum to the total without an unexplained part; the client waited at least as
    long.
    """
    began_at = time.monotonic()
    explain = {"x-tandem-explain": "1"}
    with http.stream("POST", "/v1/completions", json=completion(recall(20).text, **more), headers=explain) as reply:
        waited_ms = (time.monotonic() - began_at) * 1000
        parts = server_timing(reply)
    total = parts.pop("total")
    assert sum(parts.values()) == pytest.approx(total, abs=1)
    assert most | {"router", "slot_wait", "hops", "frontend"} <= parts.keys()
    assert not parts.keys() & (none | {"unexplained", "retries", "recompute"})
    assert 0 < total <= waited_ms
    assert parts["prefill"] > 0


def test_nobody_is_told_who_has_not_asked(http):
    """Without the header, a client receives no explanation; the histograms still count its
    request.
    """
    before = metric(http, "tandem_latency_breakdown_seconds_count", route="remote", part="first_step")
    assert "server-timing" not in http.post("/v1/completions", json=completion("abc")).headers
    assert metric(http, "tandem_latency_breakdown_seconds_count", route="remote", part="first_step") == before + 1


@pytest.mark.parametrize(
    ("endpoint", "body", "reason"),
    [
        ("/v1/completions", completion(["abc", "def"], echo=True), "echo"),
        ("/v1/completions", completion([7]), "short_prompt"),
        ("/v1/completions", completion("abc", echo=True, logprobs=1), "echo"),
        ("/v1/completions", completion("abc", prompt_logprobs=1), "prompt_logprobs"),
        ("/v1/completions", completion("abc", use_beam_search=True, n=2), "use_beam_search"),
        ("/v1/responses", response(tools=[{"type": "code_interpreter", "container": "c"}]), "tools_of_the_server"),
        ("/tokenize", {"model": MODEL, "prompt": "abc"}, "tokens_only"),
        ("/detokenize", {"model": MODEL, "tokens": [2, 7, 8]}, "tokens_only"),
    ],
)
def test_what_cannot_be_split_is_served_by_decode(http, endpoint, body, reason):
    """Decode serves the request, and a header has the reason for the local route."""
    reply = http.post(endpoint, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-tandem-route"] == "local"
    assert reply.headers["x-tandem-local-reason"] == reason


@pytest.mark.parametrize(
    "more",
    [
        {"min_tokens": 3},
        {"logprobs": 3},
        {"stop": ["9"]},
        {"prompt": [5, 6, 7, 8]},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"truncate_prompt_tokens": 4},
    ],
    ids=lambda more: next(iter(more)),
)
def test_options_of_the_output_are_decodes_alone(http, more):
    """Such requests are split, and both legs accept them."""
    reply = http.post("/v1/completions", json=completion("some text here") | more)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-tandem-route"] == "remote"


@pytest.mark.parametrize(
    ("endpoint", "content", "status", "message"),
    [
        ("/v1/completions", b"{", 400, "not valid JSON"),
        ("/v1/completions", b"[]", 400, "must be a JSON object"),
        ("/v1/completions", completion("a", kv_transfer_params={}), 400, "kv_transfer_params"),
        ("/v1/completions", completion("a") | {"model": "other"}, 404, "other"),
        ("/v1/completions", completion("a", max_tokens=-1), 400, "max_tokens"),
        ("/v1/completions", completion("a", max_tokens="many"), 400, "max_tokens"),
        ("/v1/completions", completion("a", temperature=-3), 400, "temperature"),
        ("/v1/completions", completion("!" * 3000), 400, "context length"),
        ("/v1/completions", completion([5, 10**9]), 400, "vocabulary"),
        (
            "/v1/completions",
            completion("a") | {"stream_interval": 2**64},
            400,
            "`stream_interval` must fit in a 64-bit integer",
        ),
        ("/v1/completions", completion("a") | {"vllm_xargs": {"x": "\ud800"}}, 400, "surrogate"),
        ("/v1/chat/completions", {"model": MODEL, "messages": TURN, "stop": "\ud800"}, 400, "surrogate"),
        ("/v1/completions", completion("a") | {"cache_salt": "\ud800"}, 400, "cache_salt"),
        ("/v1/completions", completion("a") | {"priority": 2**64}, 400, ""),
        ("/v1/completions", {"model": MODEL}, 400, "prompt"),
        ("/v1/completions", completion(""), 400, "prompt"),
        ("/v1/chat/completions", {"model": MODEL, "messages": "hi"}, 400, "messages"),
        ("/v1/chat/completions", {"model": MODEL, "messages": TURN, "n": 0}, 400, "n"),
        ("/v1/responses", response(max_output_tokens="many"), 400, "max_output_tokens"),
        ("/v1/responses", response(previous_response_id="resp_0"), 404, "resp_0"),
        ("/v1/responses", response(background=True), 400, "background"),
        ("/v1/completions", b"x" * (33 * 2**20), 413, "bytes"),
    ],
)
def test_a_bad_request_gets_an_error_in_openais_form(http, endpoint, content, status, message):
    """Invalid requests get an error of the 4xx range without a wait."""
    sent = content if isinstance(content, bytes) else json.dumps(content).encode()
    began = time.monotonic()
    reply = http.post(endpoint, headers={"content-type": "application/json"}, content=sent)
    assert reply.status_code == status, reply.text
    assert message in reply.json()["error"]["message"]
    assert reply.json()["error"]["code"] == status
    assert time.monotonic() - began < SOON_S


def test_an_endpoint_of_other_models_gets_vllms_404(http):
    reply = http.post("/v1/embeddings", json={"model": MODEL, "input": "a"})
    assert (reply.status_code, reply.json()) == (404, {"detail": "Not Found"})


def test_an_invocation_is_split_like_its_endpoint(http):
    """SageMaker's path, with a body of either endpoint or of none."""
    for body, found in ((completion("mira=427\nmira?"), "text_completion"), ({"messages": TURN}, "chat.completion")):
        reply = http.post("/invocations", json={"model": MODEL, "max_tokens": 3, **body})
        assert (reply.status_code, reply.json()["object"]) == (200, found)
        assert reply.headers["x-tandem-route"] == "remote"
    reply = http.post("/invocations", json={"model": MODEL, "input": "a"})
    assert reply.status_code == 400
    assert "Either prompt or prompt_embeds must be provided" in reply.json()["error"]["message"]


def test_the_sdk_sees_typed_errors(sdk):
    """OpenAI's client maps statuses and bodies to its own exception classes."""
    with pytest.raises(openai.NotFoundError, match="nope"):
        sdk.completions.create(model="nope", prompt="a")
    with pytest.raises(openai.BadRequestError, match="kv_transfer_params"):
        sdk.completions.create(model=MODEL, prompt="a", extra_body={"kv_transfer_params": {"x": 1}})


async def _has_left(service: ServiceProcess, http: httpx.Client, body: dict, after_s: float) -> bool:
    """Send a request and leave; return whether the router has counted a disconnect.

    False if this process was stopped for so long that the answer had ended before.
    """
    ended_before = metric(http, "vllm:request_success_total", role="decode", finished_reason="length")
    before = metric(http, "tandem_client_disconnects_total")
    await _leave(service, body, after_s)
    # On a busy machine, the router detects the disconnect later.
    give_up_at = time.monotonic() + IDLE_TIMEOUT_S
    while (left := metric(http, "tandem_client_disconnects_total")) != before + 1:
        if metric(http, "vllm:request_success_total", role="decode", finished_reason="length") > ended_before:
            return False
        assert time.monotonic() < give_up_at, f"{left - before:g} clients have left"
    return True


async def _leave(service: ServiceProcess, body: dict, after_s: float) -> None:
    """Send a request; close the connection `after_s` seconds after its last byte."""
    content = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(head.encode() + b"\r\n\r\n" + content)
    await writer.drain()
    await asyncio.sleep(after_s)
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("after_s", "facts", "tokens"), [(0.5, 4, 1500), (0.03, 200, 600)], ids=["in decode", "in prefill"]
)
async def test_a_client_that_leaves_ends_both_legs(service, http, stream, after_s, facts, tokens):
    """Requests and blocks of both engines return to zero long before the answer would have
    ended.
    """
    body = completion(recall(20, facts).text, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, stream=stream)
    for _ in range(ATTEMPTS):
        if await _has_left(service, http, body, after_s):
            break
    else:
        raise AssertionError(f"each of {ATTEMPTS} answers ended before the client left")
    wait_until_idle(http)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("leaves", [False, True], ids=["refused", "left"])
async def test_a_prefill_that_ends_before_decode_says_no(service, http, leaves):
    """The router discards KV that no engine will fetch before its lease ends."""
    wait_until_idle(http)
    done = metric(http, "vllm:request_success_total", role="prefill")
    # Decode's API server reads the whole body before it refuses it; the prefill leg omits the
    # field.
    body = completion("a", logit_bias={str(10**6 + token): 1 for token in range(300_000)}, max_tokens="many")
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        for _ in range(10):  # on a busy machine decode may refuse before prefill has started
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            refused: set[asyncio.Task[httpx.Response]] = set()
            while not refused and metric(http, "vllm:request_success_total", role="prefill") == done:
                refused, _ = await asyncio.wait([asked], timeout=0.01)
            if not refused:
                break
        assert not refused, "decode has refused ten times before prefill had run"
        if leaves:
            asked.cancel()
        else:
            assert (await asked).status_code == 400
    await asyncio.sleep(0.2)
    wait_until_idle(http)


async def test_clients_that_leave_at_any_moment(service, http):
    """The router returns every slot; a leaked slot would delay the last test's stop."""
    rng = random.Random("leaving")
    body = completion(recall(30).text, stream=True, max_tokens=50)

    async def leave(client: httpx.AsyncClient, index: int) -> None:
        await asyncio.sleep(0.02 * index)
        with suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.002, 0.15)):
                await client.post("/v1/completions", json=body)

    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        await asyncio.gather(*(leave(client, index) for index in range(150)))
    await asyncio.sleep(0.2)
    wait_until_idle(http)


async def test_many_at_once(service, http):
    """All answers are right, and nothing leaks."""
    prompts = [recall(100 + index, facts=5 + 9 * index) for index in range(16)]
    async with httpx.AsyncClient(base_url=service.url, timeout=120) as client:
        replies = await asyncio.gather(
            *(client.post("/v1/completions", json=completion(prompt.text)) for prompt in prompts)
        )
    texts = [reply.json()["choices"][0]["text"] for reply in replies]
    wrong = [prompt.answer for prompt, text in zip(prompts, texts, strict=True) if not exact(prompt, text)]
    assert not wrong
    wait_until_idle(http)


async def test_hostile_requests(service, http):
    """Fuzzed requests cause no 500, hang or growth, and later answers are right.

    `make fuzz` sends many more.
    """
    report = await attack(service.url, seed=3, count=160, processes=service.processes(), bound_s=330)
    check(report)
    wait_until_idle(http)
    assert http.get("/health").json() == {"status": "ok", "replicas": {"prefill": 1, "decode": 1}}
    prompt = recall(55)
    reply = http.post("/v1/completions", json=completion(prompt.text))
    assert exact(prompt, reply.json()["choices"][0]["text"])
    assert reply.headers["x-tandem-route"] == "remote"


def test_a_list_of_prompts(http):
    """Prefill computes each prompt, and each answer has its prompt's facts, whole and streamed."""
    prompts = [recall(seed) for seed in range(40, 43)]
    body = completion([prompt.text for prompt in prompts], max_tokens=8, temperature=0)
    whole = http.post("/v1/completions", json=body)
    assert whole.headers["x-tandem-route"] == "remote"
    for prompt, choice in zip(prompts, whole.json()["choices"], strict=True):
        assert exact(prompt, choice["text"])
    texts = dict.fromkeys(range(3), "")
    streamed = http.post("/v1/completions", json=body | {"stream": True}).text
    for line in streamed.split("\n\n")[:-2]:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [choice["text"] for choice in whole.json()["choices"]]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("prompts", [1, 2])
def test_several_choices(http, prompts, stream):
    """With `n`, answers equal those of decode alone, for one prompt and for each of a list."""
    texts = [recall(60 + prompts + 2 * index).text for index in range(prompts)]
    body = completion(texts if prompts > 1 else texts[0], n=3, temperature=2, seed=5, max_tokens=8, stream=stream)

    def choices(**more: object) -> tuple[str, dict[int, str]]:
        reply = http.post("/v1/completions", json=body | more)
        texts: dict[int, str] = {}
        for part in sse(reply.text) if stream else [reply.json()]:
            for choice in part["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return reply.headers["x-tandem-route"], texts

    route, drawn = choices()
    assert (route, sorted(drawn)) == ("remote", list(range(3 * prompts)))
    assert len(set(drawn.values())) > 1
    assert choices(best_of=2) == ("local", drawn)


def test_too_many_prompts(http):
    """The router refuses the request before an engine creates one per prompt."""
    reply = http.post("/v1/completions", json=completion(["a"] * 129))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")


def answers_to_a_stranger(port: int) -> bytes:
    """Return the response of a port on this machine to a request for agent metadata."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as stranger:
        stranger.settimeout(1)
        stranger.sendall(b"tandem/%d metadata\n" % PROTOCOL_VERSION)
        return stranger.recv(1000)
    return b""


@pytest.mark.skipif(browser.CHROMIUM is None, reason="Debian's package chromium is not installed")
async def test_the_status_page_under_load(service, tmp_path):
    """A browser shows both engines and the requests. `TANDEM_PICTURES=docs/images` renews the
    documentation's pictures.
    """
    async with (
        httpx.AsyncClient(base_url=service.url, timeout=60) as client,
        browser.opened(service.url, tmp_path) as page,
    ):
        load = [
            asyncio.create_task(
                client.post("/v1/completions", json=completion(recall(seed, facts).text, max_tokens=60))
            )
            for seed, facts in enumerate([FACTS_FAR, 4, FACTS_FAR, 60, 30, 4] * 4)
        ]
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
    assert all(b"this engine has a secret, the peer none" in text for text in refusals)
    assert not any(b"transport_metadata" in text for text in said)


def test_metrics_are_one_exposition(http):
    """Every metric family occurs once, with separate samples of both engines."""
    text = http.get("/metrics").text
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    assert metric(http, "vllm:request_success_total", role="prefill") > 0
    assert metric(http, "vllm:request_success_total", role="decode") > 0
    assert metric(http, "tandem_requests_total", role="router", route="remote", status="200") > 0
    received = metric(http, "vllm:tandem_kv_requests_total", role="decode", outcome="received")
    assert 0 < received <= metric(http, "vllm:tandem_kv_requests_total", role="prefill", outcome="sent")
    for group in range(3):
        assert metric(http, "vllm:tandem_kv_sent_bytes_total", role="prefill", group=str(group)) > 0
    for stage in ("live", "held", "connecting", "offered", "ending"):
        assert metric(http, "vllm:tandem_kv_transfers", stage=stage) == 0
    assert "vllm:tandem_kv_quarantined{" in text


def test_a_wrong_key_stops_the_start_with_one_message(tmp_path):
    """The message names the key; nothing is started, and there is no stack trace."""
    config = write_config("local.yaml", tmp_path, decode={"tensor_parallel": 2})
    run = subprocess.run(
        [sys.executable, "-m", "app.run", "--config", str(config)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    advice = "no such setting; did you mean tensor_parallel_size?"
    assert run.stderr.strip() == f"{config}: decode.tensor_parallel: {advice}"
    assert "Ray: started" not in run.stdout


@pytest.mark.parametrize(
    "line",
    [
        r"\(Router pid=\d+\) INFO [\d-]+ [\d:]+ \[http_server.py:\d+\] the router listens",
        r"\(Prefill pid=\d+\) INFO [\d-]+ [\d:]+ \[engine_actor.py:\d+\] starting the prefill",
        r"\(EngineCore pid=\d+\) INFO [\d-]+ [\d:]+ \[scheduler.py:\d+\] Tandem: ",
        r"\(Worker\w* pid=\d+\) INFO [\d-]+ [\d:]+ \[worker.py:\d+\] Tandem: ",
    ],
)
def test_the_log_has_lines_of_every_process(service, line):
    assert re.search(line, service.log)


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
