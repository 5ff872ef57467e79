"""Lists of prompts: which are split, and their answers over several engines in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from actors.errors import EngineDownError
from actors.request import TRANSFER_FIELD, Call, Endpoint, ResponseStart
from actors.router.client_request import ClientRequest
from actors.router.prompt_lists import COUNTS, merged_body, parent_id, split
from actors.router.router import Router
from tests.actors.behaviours import JSON, LIMITS, OK, ask, fleet, hangs, request, well
from tests.actors.fleet import at_rest
from tests.app.http.servers import client_of

pytestmark = pytest.mark.usefixtures("virtual_time")

PROMPTS = ["a", "bb", "ccc", "dddd"]
REFUSAL = b'{"error": {"message": "no", "code": 400}}'


def asked(body: object, endpoint: Endpoint = "/v1/completions", **headers: str) -> ClientRequest:
    given = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ClientRequest(endpoint, given, raw, json.loads(raw))


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"prompt": ["a", "b"]}, [["a"], ["b"]]),
        ({"prompt": ["a", ""]}, [["a"], [""]]),
        ({"prompt": ["a", "b"], "n": 1, "echo": False, "stream": False}, [["a"], ["b"]]),
        ({"prompt": [[1, 2], [3]]}, [[[1, 2]], [[3]]]),
        ({"prompt": ["a", "b"], "n": 2}, [["a"], ["b"]]),
        ({"prompt": ["a"]}, []),
        ({"prompt": "a"}, []),
        ({"prompt": [1, 2]}, []),
        ({"prompt": []}, []),
        ({"prompt": ["a", [1]]}, []),
        ({"prompt": ["a", 1]}, []),
        ({"prompt": [[1], []]}, []),
        ({"prompt": [[1], [True]]}, []),
        ({"prompt": ["a", "b"], "n": "2"}, []),
        ({"prompt": ["a", "b"], "echo": True}, []),
        ({"prompt": ["a", "b"], "prompt_logprobs": 0}, []),
        ({"prompt": ["a", "b"], "use_beam_search": True}, []),
        ({"prompt": ["a", "b"], "prompt_embeds": "AAAA"}, []),
        ({"prompt": ["a", "b"], "stream": True}, []),
        ({"prompt": ["a", "b"], "stream": "false"}, []),
        ({}, []),
    ],
)
def test_split(body: dict[str, Any], prompts: list[Any]) -> None:
    """A list is split if engine pairs can serve each prompt, and vLLM would accept the list."""
    found = split(asked(body, x_request_id="r"))
    assert [one.body["prompt"] for one in found] == prompts
    assert [json.loads(one.raw) for one in found] == [{**body, "prompt": prompt} for prompt in prompts]
    assert [one.request_id for one in found] == [f"r-{index}" for index in range(len(prompts))]
    assert all(one.sequences == body.get("n", 1) for one in found)
    assert [one.part for one in found] == [index > 0 for index in range(len(prompts))]
    assert split(asked({**body, "prompt": ["a", "b"]}, "/v1/chat/completions")) == []


@pytest.mark.parametrize("raw", [b'"a"', b'"\\ud800"'], ids=["copied", "encoded again"])
def test_copies_of_the_other_fields_are_limited(raw: bytes) -> None:
    prompts = b", ".join([raw] * 10)
    list_of_ten = asked(b'{"prompt": [%s], "user": "%s"}' % (prompts, b"x" * 1000))
    assert len(split(list_of_ten, 10_500)) == 10
    assert split(list_of_ten, 10_000) == []
    long = asked(b'{"prompt": [%s], "user": "u"}' % prompts.replace(raw, raw[:-1] + b"x" * 1000 + b'"'))
    assert len(split(long, 10_000)) == 10


def test_the_id_of_the_list() -> None:
    assert parent_id(asked({}, x_request_id="header")) == "header"
    assert parent_id(asked({"request_id": "body"})) == "body"
    assert parent_id(asked({"request_id": 7})) == ""


def test_merged_body() -> None:
    """Choices in order, summed counts, usage details of the last prompt, no metrics: as in vLLM."""
    parts = [
        {
            "id": f"cmpl-{name}",
            "metrics": {"one": 1},
            "choices": [{"index": 0, "text": name}, {"index": 1, "text": name * 2}],
            "usage": {**dict.fromkeys(COUNTS, number), "prompt_tokens_details": {"cached_tokens": number}},
        }
        for number, name in enumerate(["a", "é"], 1)
    ]
    merged = json.loads(merged_body([json.dumps(part).encode() for part in parts], "cmpl-r"))
    assert [(one["index"], one["text"]) for one in merged["choices"]] == [(0, "a"), (1, "aa"), (2, "é"), (3, "éé")]
    assert merged["usage"] == {**dict.fromkeys(COUNTS, 3), "prompt_tokens_details": {"cached_tokens": 2}}
    assert (merged["id"], merged["metrics"]) == ("cmpl-r", None)


def completes(refuses: str = "", dies: str = "", waits: str = "") -> Any:
    """A decode engine that answers with the prompt, and counts its letters."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        (prompt,) = json.loads(call.body)["prompt"]
        if prompt == waits:
            await asyncio.sleep(60)
        if prompt == dies:
            raise EngineDownError("killed")
        if prompt == refuses:
            yield ResponseStart(400, (*JSON, (b"content-length", b"7")))
            yield REFUSAL
            return
        answer = {"id": "cmpl", "choices": [{"index": 0, "text": prompt}], "usage": dict.fromkeys(COUNTS, len(prompt))}
        yield ResponseStart(200, (*JSON, (b"content-length", b"7")))
        yield json.dumps(answer).encode()

    return serve


def http(router: Router) -> httpx.AsyncClient:
    client = client_of(router)
    client.headers["x-request-id"] = "r"
    return client


@pytest.mark.parametrize("at_once", [1, 2, 100])
async def test_prompts_are_spread_over_pairs(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt has its own transfer; the answer has the form of one server's."""
    router, p, d = fleet([well, well], [completes(), completes()])
    monkeypatch.setattr(type(d), "slots", property(lambda _: at_once))
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS})
    assert reply.headers["x-tandem-route"] == "remote"
    assert reply.headers["content-length"] == str(len(reply.content))
    said = reply.json()
    assert said["id"] == "cmpl-r"
    assert said["choices"] == [{"index": index, "text": text} for index, text in enumerate(PROMPTS)]
    assert said["usage"] == dict.fromkeys(COUNTS, 10)
    assert [len(replica.calls) for replica in [*p.replicas, *d.replicas]] == [2, 2, 2, 2]
    assert len({json.loads(call.body)[TRANSFER_FIELD]["transfer_id"] for call in p.calls}) == 4
    assert router.ongoing == router.ongoing_sequences == 0
    await at_rest(p, d)


@pytest.mark.parametrize(
    ("engines", "status"), [([completes(refuses="ccc", waits="a")], 400), ([completes(dies="bb")], 503), ([], 503)]
)
async def test_an_error_of_one_prompt_is_the_answer(engines: list[Any], status: int) -> None:
    """The other prompts are cancelled, and nothing of them is left."""
    router, p, d = fleet([well] if engines else [], engines)
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS})
    assert reply.status_code == status
    assert reply.headers["content-length"] == str(len(reply.content))
    if status == 400:
        assert reply.content == REFUSAL
    await at_rest(p, d)


async def test_a_client_that_leaves_cancels_all() -> None:
    router, p, d = fleet([hangs, hangs], [hangs, hangs])
    asking = asyncio.create_task(ask(router, request(False, prompt=PROMPTS)))
    while len(d.calls) + len(p.calls) < 8:  # noqa: ASYNC110 - the fleet has no event for it
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait({asking})
    await at_rest(p, d)


@pytest.mark.parametrize("body", [{"user": "u" * 500}, {"stream": True}], ids=["large field", "stream"])
async def test_lists_that_one_decode_engine_serves(body: dict[str, Any]) -> None:
    router, p, d = fleet([well], [OK])
    router.limits = LIMITS.model_copy(update={"max_body_bytes": 1000})
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS, **body})
    assert (reply.status_code, len(d.calls), len(p.calls)) == (200, 1, 0)
    assert reply.headers["x-tandem-local-reason"] == "several_prompts"
    await at_rest(p, d)
