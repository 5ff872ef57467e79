"""Lists of prompts over several engines in this process: spread, merged, refused, cancelled."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import httpx
import pytest

from actors.errors import EngineDownError
from actors.request import TRANSFER_FIELD, Call, ResponseStart, TokenChunk
from actors.router.router import Router
from app.http.routes import build_http
from testing.answers import body_of, whole_body
from tests.actors.behaviours import EVENTS, JSON, LIMITS, OK, ask, fleet, hangs, request, well
from tests.actors.fleet import SOURCE, Handle, Replica, at_rest, router_of

pytestmark = pytest.mark.usefixtures("virtual_time")

PROMPTS = ["a", "bb", "ccc", "dddd"]
REFUSAL = b'{"error": {"message": "no", "code": 400}}'


def completes(refuses: str = "", dies: str = "", waits: str = "", refusal: bytes = REFUSAL) -> Any:
    """A decode engine that repeats the prompt, a letter at a time, and counts its letters."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        body = json.loads(call.body)
        (prompt,) = body["prompt"]
        head = {"id": f"cmpl-{dict(call.headers)[b'x-request-id'].decode()}", "created": 1}
        counts = {name: len(prompt) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}
        if prompt == waits:
            await asyncio.sleep(60)
        if prompt == refuses:
            yield ResponseStart(400, (*JSON, (b"content-length", b"7")))
            yield refusal
        elif not body.get("stream"):
            yield ResponseStart(200, (*JSON, (b"content-length", b"7")))
            yield json.dumps({**head, "choices": [{"index": 0, "text": prompt}], "usage": counts}).encode()
        else:
            yield ResponseStart(200, EVENTS)
            for number, letter in enumerate(prompt):
                if prompt == dies and number == 1:
                    raise EngineDownError("killed")
                choices = [{"index": 0, "text": letter}]
                data = b"data: %s\n\n" % json.dumps({**head, "choices": choices}).encode()
                yield TokenChunk(data, ((number,),), source=SOURCE)
                await asyncio.sleep(0.001)
            yield b"data: %s\n\ndata: [DONE]\n\n" % json.dumps({**head, "choices": [], "usage": counts}).encode()

    return serve


def http(router: Router) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(cast(Any, build_http(cast(Any, router))))
    return httpx.AsyncClient(transport=transport, base_url="http://tandem", headers={"x-request-id": "r"})


def few_at_once(handle: Handle, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(handle), "slots", property(lambda _: most))


@pytest.mark.parametrize("at_once", [1, 2, 100])
async def test_prompts_are_spread_over_pairs(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each prompt has its own prefill and decode leg; the answer has the form of one server's."""
    router, p, d = fleet([well, well], [completes(), completes()])
    few_at_once(d, at_once, monkeypatch)
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS})
    assert reply.headers["x-tandem-route"] == "remote"
    assert reply.headers["content-length"] == str(len(reply.content))
    said = reply.json()
    assert said["id"] == "cmpl-r"
    assert said["choices"] == [{"index": index, "text": text} for index, text in enumerate(PROMPTS)]
    assert said["usage"] == dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 10)
    assert [len(replica.calls) for replica in [*p.replicas, *d.replicas]] == [2, 2, 2, 2]
    ids = [json.loads(call.body)[TRANSFER_FIELD]["transfer_id"] for call in p.calls]
    assert len(set(ids)) == 4
    assert router.ongoing == router.ongoing_sequences == 0
    await at_rest(p, d)


def texts(stream: str) -> tuple[dict[int, str], list[Any], bool]:
    """Return the text of each choice, the events without one, and whether the end mark is last."""
    *frames, last, empty = stream.split("\n\n")
    assert empty == ""
    found: dict[int, str] = {}
    other = []
    for event in (json.loads(frame.removeprefix("data: ")) for frame in frames):
        for choice in event.get("choices", ()):
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
        if not event.get("choices"):
            other.append(event)
    return found, other, last == "data: [DONE]"


@pytest.mark.parametrize("at_once", [1, 3, 100])
async def test_streams_are_merged(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    router, p, d = fleet([well, well], [completes(), completes()])
    few_at_once(d, at_once, monkeypatch)
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS, "stream": True})
    found, other, ended = texts(reply.text)
    assert (found, ended) == (dict(enumerate(PROMPTS)), True)
    assert [event["usage"]["total_tokens"] for event in other] == [10]
    await at_rest(p, d)


@pytest.mark.parametrize(("first_token", "header"), [("prefill", "decode"), ("decode", None)])
async def test_who_sampled_the_first_token(first_token: str, header: str | None) -> None:
    """The answer has the header of the first prompt's answer."""
    router, p, d = fleet([well], [completes()])
    router.limits = router.limits.model_copy(update={"first_token": first_token})
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS})
    assert (reply.status_code, reply.headers.get("x-tandem-first-token")) == (200, header)
    await at_rest(p, d)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_prompt_is_the_answer(stream: bool) -> None:
    """The client gets vLLM's status and body; the other prompts are cancelled."""
    router, p, d = fleet([well], [completes(refuses="ccc", waits="a")])
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS, "stream": stream})
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, "no")
    assert reply.headers["content-length"] == str(len(reply.content))
    await at_rest(p, d)


async def test_a_prompt_refused_after_the_stream_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream ends with one error event and the end mark."""
    router, p, d = fleet([well], [completes(refuses="dddd")])
    few_at_once(d, 1, monkeypatch)
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS, "stream": True})
    found, other, ended = texts(reply.text)
    assert (reply.status_code, found, ended) == (200, {0: "a", 1: "bb", 2: "ccc"}, True)
    assert other == [{"error": {"message": "no", "code": 400}}]
    await at_rest(p, d)


async def test_a_late_refusal_that_is_no_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream ends with an error event instead of waiting for the prompt."""
    router, p, d = fleet([well], [completes(refuses="dddd", refusal=b"Internal Server Error")])
    few_at_once(d, 1, monkeypatch)
    async with http(router) as client:
        sent = client.post("/v1/completions", json={"prompt": PROMPTS, "stream": True})
        reply = await asyncio.wait_for(sent, 20)
    _, (error,), ended = texts(reply.text)
    assert (error["error"]["code"], ended) == (500, True)
    await at_rest(p, d)


async def test_an_error_of_one_prompt() -> None:
    """A stream that no engine can continue ends with one event; nothing of the rest is left."""
    router, p, d = fleet([well], [completes(dies="dddd")])
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS, "stream": True})
    found, other, ended = texts(reply.text)
    assert (reply.status_code, ended, [event["error"]["code"] for event in other]) == (200, True, [503])
    assert found.get(3) == "d"
    await at_rest(p, d)


async def test_no_engine_for_any() -> None:
    router, p, d = fleet([], [])
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS})
    assert reply.status_code == 503
    await at_rest(p, d)


async def test_a_stream_is_continued_on_another_engine() -> None:
    """A request with several prompts on one engine cannot be resumed."""
    router, p, d = fleet([well, well], [completes(), completes(dies="dddd")])
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": [*PROMPTS, "dddd"], "stream": True})
    found, _, ended = texts(reply.text)
    assert (found, ended) == (dict(enumerate([*PROMPTS, "dddd"])), True)
    await at_rest(p, d)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_all(stream: bool) -> None:
    router, p, d = fleet([hangs, hangs], [hangs, hangs])
    asking = asyncio.create_task(ask(router, request(stream, prompt=PROMPTS)))
    while len(d.calls) + len(p.calls) < 8:  # noqa: ASYNC110 - the fleet has no event for it
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.wait({asking})
    await at_rest(p, d)


class Slots(Handle):
    """A handle with a limited number of slots, for which calls wait."""

    def __init__(self, replicas: list[Replica], slots: int) -> None:
        super().__init__(replicas)
        self._free = asyncio.Semaphore(slots)
        self._number = slots

    @property
    def slots(self) -> int:
        return self._number

    async def take(self, *arguments: Any) -> Any:
        await self._free.acquire()
        return await super().take(*arguments)

    def give_back(self, slot: Any) -> None:
        super().give_back(slot)
        self._free.release()


async def test_started_streams_of_a_list_do_not_wait_for_the_last_prompt() -> None:
    """Another request holds the last slot; the list's other streams fill the queue, then go on."""

    async def held(call: Call, _: int) -> AsyncGenerator[Any, None]:
        if json.loads(call.body)["prompt"] == "holds":
            yield ResponseStart(200, EVENTS)
            yield TokenChunk(b"data: {}\n\n", ((0,),))
            await asyncio.sleep(60)
        async for item in completes()(call, 1):
            yield item

    p, d = Handle([]), Slots([Replica("d0", held)], 4)
    router = router_of(LIMITS, p, d)
    prompts = [letter * 40 for letter in "abcd"]
    async with router.answer(request(prompt="holds")) as holder:
        await anext(body_of(holder))
        async with asyncio.timeout(30):
            _, merged = await ask(router, request(prompt=prompts))
            _, other = await ask(router, replace(request(False, prompt=["e"]), headers=((b"x-request-id", b"e"),)))
        assert d.taken == 1
    found, _, ended = texts(merged.decode())
    assert (found, ended) == (dict(enumerate(prompts)), True)
    assert json.loads(other)["choices"][0]["text"] == "e"
    await at_rest(p, d)


async def test_a_list_whose_first_prompt_waits_has_the_route_of_one_that_runs() -> None:
    """The stream begins without the first prompt, which is started later."""
    p, d = Handle([]), Slots([], 2)
    first_may_start = asyncio.Event()

    async def serve(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        if json.loads(call.body)["prompt"] == ["a"]:
            await first_may_start.wait()
        async for item in completes()(call, turn):
            yield item

    d.replicas = [Replica("d0", serve)]
    router = router_of(LIMITS, p, d)
    prompts = ["a", "b" * 100]
    async with asyncio.timeout(30), router.answer(request(prompt=prompts)) as answer:
        assert (answer.start.status, answer.route, answer.pair.decode) == (200, "local", "d0")
        first_may_start.set()
        merged = await whole_body(answer)
    found, _, ended = texts(merged.decode())
    assert (found, ended) == (dict(enumerate(prompts)), True)
    await at_rest(p, d)


@pytest.mark.parametrize("most", [1000, 10_000])
async def test_a_list_with_a_large_field_is_served_by_one_engine(most: int) -> None:
    """The limit of a body is that of all copies of the field."""
    router, p, d = fleet([well], [completes()] if most == 10_000 else [OK])
    router.limits = LIMITS.model_copy(update={"max_body_bytes": most})
    async with http(router) as client:
        reply = await client.post("/v1/completions", json={"prompt": PROMPTS, "user": "u" * 500})
    assert (reply.status_code, len(d.calls)) == (200, 4 if most == 10_000 else 1)
    assert reply.headers.get("x-tandem-local-reason") == (None if most == 10_000 else "several_prompts")
    await at_rest(p, d)
