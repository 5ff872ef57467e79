"""A stream whose first token takes long: headers and comments precede it, and errors are events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import pytest

from actors.request import Call, Heartbeat, ResponseStart, TokenChunk
from actors.router.client_request import ClientRequest
from app.http.parsing import FORM_ENDPOINTS
from testing.sse import said
from tests.actors.behaviours import (
    EVENTS,
    LIMITS,
    TOKENS,
    WHOLE,
    answers,
    counted,
    dies,
    engine,
    fleet,
    hangs,
    request,
    well,
)
from tests.actors.fleet import at_rest
from tests.app.http.servers import Client

pytestmark = pytest.mark.usefixtures("virtual_time")

COMMENT = b": keep-alive\n\n"
WRONG = {"error": {"message": "the prompt is too long", "type": "BadRequestError", "param": "prompt", "code": 400}}


def late(serve: Any, delay_s: float = 0.5) -> Any:

    async def wait(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        for _ in range(5):
            await asyncio.sleep(delay_s / 5)
            yield Heartbeat()
        async for item in serve(call, turn):
            yield item

    return wait


async def served(
    prefill: list[Any], decode: list[Any], wanted: ClientRequest, lines: list[str] | None = None, **limits: Any
) -> tuple[Client, Any]:
    router, p, d = fleet(prefill, decode)
    router.limits = LIMITS.model_copy(update={"keep_alive_s": 0.1, **limits})
    client = Client(wanted)
    await asyncio.wait_for(client.serve(router, access_log=None if lines is None else lines.append), 20)
    await at_rest(p, d)
    assert len(client.starts) == 1
    assert client.ended
    return client, router


async def test_an_error_closes_the_answer_of_a_client_that_reads_nothing() -> None:
    """The client takes a comment for longer than the deadline of the first token."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield b": ping\n\n"
        while True:
            await asyncio.sleep(0.05)
            yield Heartbeat()

    class Stuck(Client):
        async def send(self, message: dict[str, Any]) -> None:
            await super().send(message)
            if self.pieces and not reads.is_set():
                await reads.wait()

    router, _, d = fleet([], [serve])
    router.limits = LIMITS.model_copy(update={"keep_alive_s": 0.1, "first_token_timeout_s": 0.5, "idle_timeout_s": 4.0})
    client, reads, loop = Stuck(request()), asyncio.Event(), asyncio.get_running_loop()
    began_at = loop.time()
    asking = client.serve(router)
    while not d.calls or d.taken:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert loop.time() - began_at < 1.0
    reads.set()
    await asyncio.wait_for(asking, 20)


def error_of(body: bytes) -> dict[str, Any]:
    """The error of a stream that holds nothing else, followed by `[DONE]`, as in vLLM's streams."""
    event, done = body.replace(COMMENT, b"").split(b"\n\n", 1)
    assert done == b"data: [DONE]\n\n"
    return cast("dict[str, Any]", json.loads(event.removeprefix(b"data: "))["error"])


async def test_headers_and_comments_precede_the_first_token() -> None:
    """The route, unknown when the headers are sent, follows in a comment."""
    client, router = await served([well], [late(engine(1, [2]))], request())
    assert client.status == 200
    assert client.headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert b"x-tandem-route" not in client.headers
    comments = client.pieces.count(COMMENT)
    assert comments >= 2
    assert client.pieces[:comments] == [COMMENT] * comments, "an answer that has begun needs no comments"
    assert client.pieces[comments].startswith(b": x-tandem-route: remote\n\n")
    assert said(client.body)["text"] == "".join(f"<{token}>" for token in range(TOKENS))
    assert counted(router, "tandem_requests_total", route="remote", reason="", status="200") == 1


async def test_responses_of_decode_alone_have_comments() -> None:
    """vLLM sends two events of such a stream before it computes the prompt."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        yield b"event: response.created\ndata: {}\n\nevent: response.in_progress\ndata: {}\n\n"
        for _ in range(5):
            await asyncio.sleep(0.1)
            yield Heartbeat()
        yield TokenChunk(b"event: response.output_text.delta\ndata: {}\n\n", ((0,),))
        yield b"event: response.completed\ndata: {}\n\n"

    body = {"input": "a prompt", "stream": True, "tools": [{"type": "web_search"}]}
    client, _ = await served([well], [serve], ClientRequest("/v1/responses", (), json.dumps(body).encode(), body))
    assert client.pieces.count(COMMENT) >= 2
    events = [event for event in client.body.split(b"\n\n") if event and not event.startswith(b":")]
    names = [event.partition(b"\n")[0].removeprefix(b"event: response.") for event in events]
    assert names == [b"created", b"in_progress", b"output_text.delta", b"completed"]


async def test_an_answer_in_time_is_unchanged() -> None:
    client, _ = await served([well], [engine(1, [2])], request(), keep_alive_s=20.0)
    assert client.headers[b"x-tandem-route"] == b"remote"
    assert COMMENT not in client.body


async def test_retries_go_on_behind_the_comments() -> None:
    client, _ = await served([well], [late(dies), late(engine(1, [3]))], request())
    assert client.status == 200
    assert said(client.body)["text"] == "".join(f"<{token}>" for token in range(TOKENS))


@pytest.mark.parametrize(
    ("decode", "limits", "error"),
    [
        ([late(answers(400, WRONG))], {}, WRONG["error"]),
        ([late(dies)], {}, {"type": "ServiceUnavailableError", "code": 503}),
        ([hangs], {"first_token_timeout_s": 0.5}, {"type": "TimeoutError", "code": 504}),
    ],
    ids=["refused by vLLM", "engine lost", "too late"],
)
async def test_an_error_after_the_headers_is_an_event(
    decode: list[Any], limits: dict[str, Any], error: dict[str, Any]
) -> None:
    """The metrics and the access log have the status that it would have had."""
    lines: list[str] = []
    client, router = await served([], decode, request(), lines, **limits)
    assert client.status == 200
    assert error.items() <= error_of(client.body).items()
    assert counted(router, "tandem_requests_total", route="refused", reason="", status=str(error["code"])) == 1
    line = json.loads(lines[0])
    assert (line["status"], line["late_status"]) == (200, error["code"])


ANTHROPIC = {"type": "error", "error": {"type": "BadRequestError", "message": "the prompt is too long"}}
OF_RESPONSES = {"type": "error", "code": "BadRequestError", "message": "the prompt is too long", "param": "prompt"}


@pytest.mark.parametrize(
    ("endpoint", "prompt", "answer", "said"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, ANTHROPIC, ANTHROPIC),
        ("/v1/responses", {"input": "a"}, WRONG, OF_RESPONSES),
    ],
)
async def test_an_error_in_another_form(endpoint: Any, prompt: Any, answer: Any, said: Any) -> None:
    """The error event has the form of the endpoint's API, without `[DONE]`."""
    client, _ = await served([], [late(answers(400, answer))], replace(request(**prompt), endpoint=endpoint))
    kind, data = client.body.replace(COMMENT, b"").decode().split("\n", 1)
    assert (kind, json.loads(data.removeprefix("data: "))) == ("event: error", said)


def recording(endpoint: Any, **fields: str) -> ClientRequest:
    parts = [f'--b\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{fields[key]}\r\n' for key in fields]
    return ClientRequest(
        endpoint, ((b"content-type", b"multipart/form-data; boundary=b"),), ("".join(parts) + "--b--\r\n").encode(), {}
    )


@pytest.mark.parametrize("endpoint", sorted(FORM_ENDPOINTS))
async def test_streams_of_recordings(endpoint: Any) -> None:
    """Requests whose `stream` is in a form; their errors have the form of vLLM's streams."""
    client, _ = await served([], [late(engine(1, [2]))], recording(endpoint, stream="true"))
    assert client.pieces[0] == COMMENT
    assert said(client.body)["text"] == "".join(f"<{token}>" for token in range(TOKENS))
    client, _ = await served([], [late(answers(400, WRONG))], recording(endpoint, stream="true"))
    assert (client.status, error_of(client.body)) == (200, WRONG["error"])
    client, _ = await served([], [late(answers(400, WRONG))], recording(endpoint, stream="false"))
    assert client.status == 400


@pytest.mark.parametrize(
    ("stream", "interval_s", "endpoint"),
    [
        (False, 0.1, "/v1/completions"),
        (True, None, "/v1/completions"),
        ("false", 0.1, "/v1/completions"),
        (True, 0.1, "/detokenize"),
    ],
    ids=["whole", "off", "not true", "an endpoint that ignores it"],
)
async def test_others_wait_for_their_status(stream: Any, interval_s: float | None, endpoint: Any) -> None:
    for answer, status in ((answers(400, WRONG), 400), (answers(200, WHOLE), 200)):
        wanted = replace(request(stream=stream), endpoint=endpoint)
        client, _ = await served([], [late(answer)], wanted, keep_alive_s=interval_s)
        assert (client.status, len(client.pieces)) == (status, 1)


async def test_a_client_that_leaves_while_it_waits() -> None:
    router, p, d = fleet([well], [hangs])
    router.limits = LIMITS.model_copy(update={"keep_alive_s": 0.05})
    client = Client(request())
    serving = client.serve(router)
    async with asyncio.timeout(20):
        while len(client.pieces) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    client.left.set()
    await asyncio.wait_for(serving, 20)
    sent = len(client.pieces)
    await at_rest(p, d)
    await asyncio.sleep(0.2)
    assert (len(client.pieces), router.ongoing) == (sent, 0)
