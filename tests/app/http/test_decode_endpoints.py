"""Endpoints that a decode engine serves alone, through the router's HTTP application."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.engine.asgi_call import call_asgi
from actors.request import Call
from actors.router.router import Router
from tests.actors.behaviours import LIMITS, router_of
from tests.actors.fleet import Handle, Replica, at_rest
from tests.app.http.servers import client_of

FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")


async def embed(request: Request) -> Response:
    return JSONResponse({"embedded": (await request.json())["input"]})


async def transcribe(request: Request) -> Response:
    async with request.form() as form:
        file: Any = form["file"]
        said = {"heard": len(await file.read()), "language": form["language"]}
        if form.get("stream") != "true":
            return JSONResponse(said)

    async def events() -> AsyncGenerator[str, None]:
        yield f"data: {json.dumps(said)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


ENGINE: Any = Starlette(
    routes=[Route("/v1/embeddings", embed, methods=["POST"]), Route(FORMS[0], transcribe, methods=["POST"])],
    exception_handlers={404: lambda *_: JSONResponse({"error": {"message": "Not Found", "code": 404}}, 404)},
)


def serve(call: Call, _: int) -> AsyncGenerator[Any, None]:
    return call_asgi(ENGINE, call, disconnect_s=0.1)


@pytest.fixture
def decode() -> Handle:
    return Handle([Replica("d0", serve)])


@pytest.fixture
def router(decode: Handle) -> Router:
    return router_of(LIMITS, Handle([]), decode)


@pytest.fixture
def http(router: Router) -> httpx.AsyncClient:
    return client_of(router)


async def test_an_id_that_no_engine_may_log(http: httpx.AsyncClient, decode: Handle) -> None:
    """Requests without a body have the id in their header only."""
    async with http:
        reply = await http.get("/v1/models", headers={"X-Request-Id": "two words"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-id")
    assert not decode.calls


@pytest.mark.parametrize("stream", [False, True])
async def test_a_recording(stream: bool, http: httpx.AsyncClient, decode: Handle) -> None:
    """The form arrives as the client sent it."""
    fields = {"language": "de", "stream": "true" if stream else "false", "vllm_xargs": "{}"}
    async with http:
        reply = await http.post(FORMS[0], data=fields, files={"file": bytes(100_000)})
    assert reply.status_code == 200
    said = {"heard": 100_000, "language": "de"}
    assert reply.text == (f"data: {json.dumps(said)}\n\ndata: [DONE]\n\n" if stream else reply.text)
    assert stream or reply.json() == said
    await at_rest(decode)


@pytest.mark.parametrize("form", FORMS)
async def test_a_form_sets_no_transfer(form: str, http: httpx.AsyncClient, decode: Handle) -> None:
    """The router refuses the name, escaped or not; the engine checks any other form."""
    async with http:
        for extra in ('{"kv_transfer_params": "x"}', '{"\\u006bv_transfer_params": "x"}'):
            reply = await http.post(form, data={"vllm_xargs": extra}, files={"file": b"a"})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "vllm_xargs")
        assert not decode.calls
        kind = {"content-type": "multipart/form-data; boundary=b"}
        await http.post(FORMS[1], content=b"no form", headers=kind)
        await http.post(FORMS[1], data={"vllm_xargs": "{"}, files={"file": b"a"})
        assert len(decode.calls) == 2
    await at_rest(decode)


@pytest.mark.parametrize("charset", ["punycode", "undefined"])
async def test_a_form_that_its_charset_cannot_decode(charset: str, http: httpx.AsyncClient, decode: Handle) -> None:
    """The router sends the form to an engine, which has the same parser and returns an error."""
    content = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n..\r\n--b--\r\n'
    kind = {"content-type": f"multipart/form-data; boundary=b; charset={charset}"}
    async with http:
        reply = await http.post(FORMS[1], content=content, headers=kind)
    assert (reply.status_code, len(decode.calls)) == (404, 1)
    await at_rest(decode)


async def test_a_batch_of_chats_counts_each(http: httpx.AsyncClient, decode: Handle) -> None:
    turn = [{"role": "user", "content": "hi"}]
    async with http:
        await http.post("/v1/chat/completions/batch", json={"messages": [turn] * 3})
        assert [call.sequences for call in decode.calls] == [3]
        reply = await http.post("/v1/chat/completions/batch", json={"messages": [turn] * (LIMITS.max_prompts + 1)})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    await at_rest(decode)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [{"role": "user", "content": "hi"}], "prompt": "a"}, "/v1/chat/completions"),
        ({"messages": None, "prompt": "a", "stream": True}, "/v1/completions"),
        ({"prompt_embeds": "aa"}, "/v1/completions"),
        ({"input": 1}, "/invocations"),
    ],
)
async def test_an_invocation_goes_to_the_endpoint_of_its_fields(
    body: dict[str, Any], path: str, http: httpx.AsyncClient, decode: Handle
) -> None:
    """SageMaker sends all requests to this path; an adapter in its header would be a model."""
    async with http:
        await http.post("/invocations", json=body)
        assert [call.path for call in decode.calls] == [path]
        reply = await http.post("/invocations", json=body, headers={"X-Amzn-SageMaker-Adapter-Identifier": "sql"})
        assert (reply.status_code, reply.json()["error"]["param"], len(decode.calls)) == (400, "model", 1)
    await at_rest(decode)


async def test_ping_and_load(http: httpx.AsyncClient, router: Router, decode: Handle) -> None:
    """The router answers both itself, without a key."""
    async with http:
        assert [(await http.request(method, "/ping")).status_code for method in ("GET", "POST")] == [503, 503]
        decode._known = True  # noqa: SLF001 - as after the first request
        assert (await http.get("/ping")).status_code == 200
        assert (await http.get("/load")).json() == {"server_load": 0}
        with router.admitted():
            assert (await http.get("/load")).json() == {"server_load": 1}
        assert (await http.get("/tokenizer_info")).status_code == 404
    assert [call.path for call in decode.calls] == ["/tokenizer_info"]
    await at_rest(decode)
