"""Requests that the router refuses before an engine receives them."""

from contextlib import nullcontext

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from actors.router.client_request import ClientRequest
from app.http.errors import BadRequestError, error_response
from app.http.parsing import check_prompts, parse_body, read_request
from configs.settings.router import RouterLimits


@pytest.mark.parametrize(
    ("raw", "message", "param"),
    [
        (b"", "the body is empty; send a JSON object", "body"),
        (b"{", "not valid JSON", "body.1"),
        (b"\xff\xfe{}", "not valid JSON", "body.0"),
        (b"[" * 100_000, "cannot be decoded as JSON; send UTF-8, at most 64 levels of nesting", "body"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "and integers of at most 4300 digits", "body"),
        (b"[]", "must be a JSON object, not list", "body"),
        (b"null", "must be a JSON object, not NoneType", "body"),
        (b'{"kv_transfer_params": {}}', "kv_transfer_params is reserved for this service", "kv_transfer_params"),
        (b'{"kv_transfer_params": null}', "kv_transfer_params is reserved for this service", "kv_transfer_params"),
        (b'{"request_id": "a\\nINFO 01-01 forged"}', "request_id must have 1 to 256 visible ASCII char", "request_id"),
        (b'{"request_id": "' + b"x" * 257 + b'"}', "request_id must have", "request_id"),
        (b'{"request_id": ""}', "request_id must have", "request_id"),
        (b'{"request_id": "\\u0085"}', "request_id must have", "request_id"),
        (b'{"session_id": "a b"}', "session_id must have", "session_id"),
        (b'{"structured_outputs": "x"}', "structured_outputs must be an object", "body.structured_outputs"),
        (
            b'{"structured_outputs": [{"regex": "a"}]}',
            "structured_outputs must be an object",
            "body.structured_outputs",
        ),
        (b'{"structured_outputs": 0}', "structured_outputs must be an object", "body.structured_outputs"),
        (b'{"structured_outputs": true}', "structured_outputs must be an object", "body.structured_outputs"),
        (b'{"messages": [{"content": [{"type": "text"}, {"uuid": "a"}]}]}', "`uuid` of a content part", "messages"),
        (b'{"messages": [[{"content": [{"uuid": "a"}]}]]}', "`uuid` of a content part", "messages"),
        (b'{"input": [{"content": [{"type": "input_image", "uuid": "a"}]}]}', "`uuid` of a content part", "input"),
        (b'{"input": [{"type": "function_call_output", "output": [{"uuid": "a"}]}]}', "`uuid` of a", "input"),
        (b'{"vllm_xargs": {"kv_transfer_params": "x"}}', "vllm_xargs.kv_transfer_params is reserved for", "vllm_xargs"),
    ],
)
def test_a_body_that_is_refused(raw, message, param):
    with pytest.raises(BadRequestError, match=message) as raised:
        parse_body(raw)
    assert raised.value.param == param


@pytest.fixture
def client():
    """An application that reads requests of at most 100 bytes and echoes them."""

    async def endpoint(request: Request) -> JSONResponse:
        try:
            read = await read_request(request, "/v1/completions", RouterLimits(max_body_bytes=100))
        except BadRequestError as error:
            return error_response(error, retry_after_s=1)
        headers = {name.decode(): value.decode() for name, value in read.headers}
        return JSONResponse({"body": read.body, "headers": headers})

    with TestClient(Starlette(routes=[Route("/", endpoint, methods=["POST"])])) as client:
        yield client


def test_a_good_request_is_read(client):
    reply = client.post("/", json={"prompt": "x"}, headers={"x-request-id": "r1", "authorization": "Bearer s"})
    assert reply.json() == {
        "body": {"prompt": "x"},
        "headers": {"accept": "*/*", "content-type": "application/json", "x-request-id": "r1"},
    }


def test_a_request_without_an_id_gets_one(client):
    """Both legs have the same id, so their logs can be joined."""
    ids = {client.post("/", json={}).json()["headers"]["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("size_bytes", "status"), [(100, 200), (101, 413)])
def test_the_limit_of_a_body_is_exact(client, size_bytes, status, declared):
    raw = b'{"prompt": "' + b"x" * (size_bytes - 14) + b'"}'
    assert len(raw) == size_bytes
    assert client.post("/", content=raw if declared else iter([raw[:50], raw[50:]])).status_code == status


@pytest.mark.parametrize(
    ("header", "sent"),
    [(None, False), ("0af76519-16cd-43dd-8448-eb211c80319c", False), ("trace-1", True)],
    ids=["none", "Serve's", "the client's"],
)
def test_a_request_that_its_body_names(client, header, sent):
    """vLLM prefers the header to the body's field, so a generated header is removed."""
    headers = {"x-request-id": header} if header else {}
    given = client.post("/", json={"request_id": "mine"}, headers=headers).json()["headers"]
    assert given.get("x-request-id") == (header if sent else None)


@pytest.mark.parametrize("name", ["X-Request-Id", "X-Session-ID"])
@pytest.mark.parametrize(("given", "status"), [(b"x" * 256, 200), (b"x" * 257, 400), (b"a\x85b", 400), (b"a b", 400)])
def test_an_id_in_a_header_has_the_form_of_an_id(client, name, given, status):
    reply = client.post("/", json={}, headers={name.encode(): given})
    assert reply.status_code == status
    if status == 400:
        assert reply.json()["error"]["param"] == name.lower()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a"] * 5}, "prompt"),
        ({"prompt": [[1, 2]] * 5}, "prompt"),
        ({"query": "q", "items": ["a"] * 5}, "items"),  # the list of /generative_scoring
        ({"prompt_embeds": ["x"] * 5}, "prompt_embeds"),
        ({"prompt": ["a"] * 2, "prompt_embeds": ["x"] * 5}, "prompt_embeds"),
        ({"prompt": ["a", "b"], "n": 3}, "n"),
        ({"messages": [], "n": 10**30}, "n"),
        *(({"prompt": "a", "n": n}, "n") for n in (5, "5", " 5.0", 5.0)),  # vLLM converts these
        # One long prompt counts once; decode refuses malformed prompts and numbers.
        *(({"prompt": ["a"] * 4, "n": n}, None) for n in (None, "1", "nine", 9.5, float("inf"), [9], -9, True)),
        *(({"prompt": prompt}, None) for prompt in ([1] * 1000, [], {"a": 1}, None, [None, "a"], ["a"] * 4)),
        ({"prompt": ["a", "b"], "n": 2}, None),
        ({"messages": [{}] * 100}, None),
        ({}, None),
    ],
)
def test_the_limit_of_answers(body, param):
    """The router counts answers before an engine creates a request for each."""
    with pytest.raises(BadRequestError, match="at most 4 answers") if param else nullcontext() as raised:
        check_prompts(body, 4)
    assert raised is None or raised.value.param == param
    assert ClientRequest("/generative_scoring", (), b"", {"items": ["a"] * 5}).sequences == 5
