"""`/v1/messages` through the router's HTTP application: both legs, streams, resume, errors."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any, cast

import httpx
import pytest

from actors.errors import EngineDownError
from actors.request import TRANSFER_FIELD, Call, ResponseStart, TokenChunk
from app.http.routes import build_http
from tests.actors.behaviours import EVENTS, answers, fleet, well
from tests.actors.fleet import SOURCE, Handle, at_rest

pytestmark = pytest.mark.usefixtures("virtual_time")

BODY = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
MESSAGE = {"type": "message", "content": [{"type": "text", "text": "right"}]}
TOKENS = 4


def event(kind: str, **data: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n".encode()


def message(dies_after: int | None = None) -> Any:
    """A decode engine that streams a message of four tokens, and repeats a replay log first."""

    async def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
        yield ResponseStart(200, EVENTS)
        for token in range(TOKENS):
            if token == dies_after:
                raise EngineDownError("killed")
            before = event("message_start") + event("content_block_start", index=0) if token == 0 else b""
            delta = event("content_block_delta", index=0, delta={"type": "text_delta", "text": str(token)})
            yield TokenChunk(before + delta, ((token,),), source=SOURCE)
        yield event("content_block_stop", index=0) + event("message_delta") + event("message_stop")

    return serve


def service(prefill: list[Any], decode: list[Any]) -> tuple[httpx.AsyncClient, Handle, Handle]:
    router, p, d = fleet(prefill, decode)
    transport = httpx.ASGITransport(cast(Any, build_http(cast(Any, router))))
    return httpx.AsyncClient(transport=transport, base_url="http://tandem"), p, d


async def test_a_message_has_both_legs() -> None:
    """Prefill gets a limit of one token; decode gets the client's request and the transfer."""
    http, p, d = service([well], [answers(200, MESSAGE)])
    async with http:
        reply = await http.post("/v1/messages", json=BODY)
    assert (reply.status_code, reply.json(), reply.headers["x-tandem-route"]) == (200, MESSAGE, "remote")
    (first,), (second,) = p.calls, d.calls
    assert (first.path, second.path) == ("/v1/messages", "/v1/messages")
    prefilled, decoded = json.loads(first.body), json.loads(second.body)
    assert prefilled.pop(TRANSFER_FIELD)["transfer_id"] == decoded.pop(TRANSFER_FIELD)["transfer_id"]
    assert (prefilled["max_tokens"], prefilled["stream"], decoded) == (1, False, BODY)
    await at_rest(p, d)


@pytest.mark.parametrize("dies_after", [None, 0, 1, 3])
async def test_a_streamed_message(dies_after: int | None) -> None:
    """The client receives every event once, also if the first decode engine dies."""
    # The router asks d1 first.
    http, p, d = service([well, well], [message(), message(dies_after)])
    async with http:
        reply = await http.post("/v1/messages", json=BODY | {"stream": True})
    said = [json.loads(frame.partition("data: ")[2]) for frame in reply.text.split("\n\n") if frame]
    kinds = [one["type"] for one in said]
    assert kinds[:2] + kinds[-3:] == [
        *("message_start", "content_block_start"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert [one["delta"]["text"] for one in said[2:-3]] == [str(token) for token in range(TOKENS)]
    assert len(d.calls) == (1 if dies_after is None else 2)
    await at_rest(p, d)


async def test_tokens_are_counted_on_decode_alone() -> None:
    http, p, d = service([well], [answers(200, {"input_tokens": 3})])
    async with http:
        reply = await http.post("/v1/messages/count_tokens", json=BODY)
    assert (reply.json(), reply.headers["x-tandem-local-reason"]) == ({"input_tokens": 3}, "tokens_only")
    assert (len(p.calls), [call.path for call in d.calls]) == (0, ["/v1/messages/count_tokens"])
    await at_rest(p, d)


async def test_errors_have_anthropics_form() -> None:
    """The router's own errors have Anthropic's form, before a stream and in it."""
    http, p, d = service([], [])
    async with http:
        reply = await http.post("/v1/messages", json=BODY)
        assert (reply.status_code, reply.json()["error"]["type"]) == (503, "ServiceUnavailableError")
        assert reply.json()["type"] == "error"
        reply = await http.post("/v1/messages", json=BODY | {TRANSFER_FIELD: {}})
        assert (reply.status_code, reply.json()["type"]) == (400, "error")
    await at_rest(p, d)
    http, p, d = service([well], [message(dies_after=2)])
    async with http:
        reply = await http.post("/v1/messages", json=BODY | {"stream": True})
    *_, last, empty = reply.text.split("\n\n")
    assert (last.partition("\n")[0], empty) == ("event: error", "")
    assert json.loads(last.partition("data: ")[2])["error"]["type"] == "ServiceUnavailableError"
    await at_rest(p, d)
