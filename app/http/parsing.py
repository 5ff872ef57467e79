"""Read an HTTP request into a `ClientRequest`, with the checks that precede dispatch."""

import asyncio
import json
import re
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.types import Message, Scope

from actors import large_json
from actors.errors import UnavailableError
from actors.large_json import off_loop
from actors.policy.prompts import answers_each
from actors.request import TRANSFER_FIELD, Endpoint, Headers
from actors.router.client_request import ClientRequest
from app.http.errors import BadRequestError, MalformedError
from configs.settings.router import RouterLimits

MAX_DEPTH = 64
"""Maximum nesting depth of a body; JSON schemas of tools have a depth of about twelve."""

OWN_PORT = "tandem.own_port"
"""Key in the scope of a request that arrived at the router's port, not through Serve's proxy."""

PROXY_ID = re.compile("[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
"""Form of the request id, a UUID, that Serve's proxy gives a request without one.

See `generate_request_id` in ray/serve/_private/utils.py.
"""

ID = re.compile("[!-~]{1,256}")
"""Form of a client's id. Engines write it to their logs and repeat it in each chunk of a stream, so
a long one would delay the streams of all clients.
"""

ID_FIELDS = ("request_id", "session_id")
ID_HEADERS = (b"x-request-id", b"x-session-id")

FORWARDED_HEADERS = frozenset(
    {
        b"accept",
        b"content-type",
        b"traceparent",
        b"tracestate",
        b"x-request-id",
        b"x-session-id",
    }
)
"""Request headers that the router forwards to the engines whatever its settings.

`read_request` omits `x-request-id` if the id in the body takes precedence.
"""

FORM_ENDPOINTS: frozenset[Endpoint] = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Endpoints whose body is a form with a file."""

INVOKED: Mapping[str, Endpoint] = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "prompt_embeds": "/v1/completions",
}
"""Endpoints for the body of `/invocations`, by its first field that is set; vLLM's order."""

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
"""Header of `/invocations` that takes the place of `model` in vLLM."""

CROWDS = "tandem.crowds"
"""Key in the scope of a request whose API key has more than its share of the ongoing requests."""

PRIORITY_HEADER = b"x-vllm-priority"
"""Request header forwarded if `router.client_priority` is set."""


def path_of(scope: Scope) -> str:
    return str(scope.get("path", "")).removeprefix(scope.get("root_path", ""))


async def read_request(
    request: Request, endpoint: Endpoint, limits: RouterLimits, explain: bool = False
) -> ClientRequest:
    """Read and check a request. For `/invocations`, a field of the body selects the endpoint.

    ``explain``  see `ClientRequest`

    Raises BadRequestError if the request is invalid or its body is late (`body_timeout_s`),
    ClientDisconnect if the client closes the connection before the end of the body, and
    UnavailableError if no thread has parsed the body after as long again.
    """
    arrived_at = time.monotonic()
    raw = await read_body(request, limits.max_body_bytes, limits.body_timeout_s)
    read_at = time.monotonic()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            if endpoint in FORM_ENDPOINTS:
                body = await parse_form(request, raw)
            else:
                body = await off_loop(len(raw), partial(parse_body, raw))
            if endpoint == "/invocations":
                if ADAPTER_HEADER in request.headers:
                    message = f"{ADAPTER_HEADER} is not supported; name the adapter in `model`"
                    raise BadRequestError(message, param="model")
                # For the bodies of other models, decode's vLLM chooses the endpoint.
                endpoint = next((one for field, one in INVOKED.items() if body.get(field) is not None), endpoint)
            check_prompts(body, limits.max_prompts)
            headers = forwarded_headers(request, limits.client_priority)
            if isinstance(body.get("request_id"), str) and not _sends_id(request):
                # vLLM would prefer the generated header to the body's id.
                headers = tuple(header for header in headers if header[0] != b"x-request-id")
            session = request.headers.get(limits.routing.session_header)
            crowds = bool(request.scope.get(CROWDS))
            found = ClientRequest(
                endpoint,
                headers,
                raw,
                body,
                session,
                explain,
                crowds=crowds,
                sets_priority=limits.client_priority,
                arrived_at=arrived_at,
                read_at=read_at,
            )
            await found.prepare()
    except TimeoutError:
        message = f"the router has not parsed the body within {limits.body_timeout_s:g} s: it is busy; try again"
        raise UnavailableError(message) from None
    return found


def forwarded_headers(request: Request, client_priority: bool = False) -> Headers:
    passed = FORWARDED_HEADERS | {PRIORITY_HEADER} if client_priority else FORWARDED_HEADERS
    given: dict[bytes, bytes] = {}
    for name, value in request.headers.raw:
        if name in passed:
            given.setdefault(name, value)  # Starlette also reads the first value
    for name in ID_HEADERS:
        _check_id(given[name].decode("latin-1") if name in given else None, name.decode())
    given.setdefault(b"x-request-id", uuid.uuid4().hex.encode())
    return tuple(given.items())


def _sends_id(request: Request) -> bool:
    given = request.headers.get("x-request-id")
    return given is not None and (OWN_PORT in request.scope or not PROXY_ID.fullmatch(given))


def parse_body(raw: bytes) -> dict[str, Any]:
    """Return the parsed body.

    Raises BadRequestError for a body that is not a JSON object or has too many levels, and for
    reserved, unsupported or malformed fields or ids.
    """
    if not raw:
        raise MalformedError("the body is empty; send a JSON object", "body")
    try:
        body = large_json.loads(raw)
    except json.JSONDecodeError as error:
        raise MalformedError(f"the body is not valid JSON: {error}", f"body.{error.pos}") from None
    except (ValueError, RecursionError):
        raise MalformedError(
            f"the body cannot be decoded as JSON; send UTF-8, at most {MAX_DEPTH} levels of nesting, and integers of "
            f"at most {sys.get_int_max_str_digits()} digits",
            "body",
        ) from None
    if not isinstance(body, dict):
        raise MalformedError(f"the body must be a JSON object, not {type(body).__name__}", "body")
    _check_depth(body)
    if TRANSFER_FIELD in body:
        raise BadRequestError(f"{TRANSFER_FIELD} is reserved for this service; remove the field", param=TRANSFER_FIELD)
    for field in ID_FIELDS:
        _check_id(body.get(field), field)
    structured = body.get("structured_outputs")
    if structured is not None and not isinstance(structured, dict):
        # For other types vLLM answers HTTP 500.
        raise MalformedError("structured_outputs must be an object", "body.structured_outputs")
    _check_extra(body.get("vllm_xargs"))
    for field in ("messages", "input"):
        _check_media(body.get(field), field)
    return body


async def parse_form(request: Request, raw: bytes) -> dict[str, Any]:
    """Return the form fields that the router needs. Raises BadRequestError for reserved fields.

    Return no fields for a form that cannot be parsed: engines use the same parser, and answer the
    request with an error.
    """

    async def receive() -> Message:
        return {"type": "http.request", "body": raw, "more_body": False}

    try:
        async with Request(request.scope, receive).form() as form:
            extra, stream, model = (form.get(name) for name in ("vllm_xargs", "stream", "model"))
    except (MultiPartException, ValueError):  # ValueError: of the codec that the form names as its charset
        return {}
    with suppress(ValueError, RecursionError):
        found = json.loads(extra) if isinstance(extra, str) else None
        _check_extra(found)
    return {"stream": stream in ("true", "True", "1")} | ({"model": model} if isinstance(model, str) else {})


def _check_id(value: Any, name: str) -> None:
    if isinstance(value, str) and not ID.fullmatch(value):
        raise BadRequestError(f"{name} must have 1 to 256 visible ASCII characters and no blanks", name)


def _check_extra(extra: Any) -> None:
    if isinstance(extra, dict) and TRANSFER_FIELD in extra:
        raise BadRequestError(
            f"vllm_xargs.{TRANSFER_FIELD} is reserved for this service; remove the field", param="vllm_xargs"
        )


def _check_media(messages: Any, field: str) -> None:
    """Raise BadRequestError for a content part (image, recording, video) with a `uuid`.

    vLLM identifies contents in all caches by `uuid`. With one `uuid` for different contents,
    engines would exchange KV of the wrong content.
    """
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, list):
            _check_media(message, field)  # a batch of chats
            continue
        # `output` is the content of a tool's result in /v1/responses.
        contents = [message.get("content"), message.get("output")] if isinstance(message, dict) else []
        for part in (part for content in contents if isinstance(content, list) for part in content):
            if isinstance(part, dict) and part.get("uuid") is not None:
                raise BadRequestError(
                    "`uuid` of a content part is not supported: this service identifies media by their content; "
                    "remove the field and send the content",
                    param=field,
                )


def check_prompts(body: Mapping[str, Any], most: int) -> None:
    """Raise BadRequestError if prompts times `n` exceed `most`.

    The decode engine reports other errors in these fields.
    """
    prompts = {field: _several(body.get(field)) for field in ("prompt", "prompt_embeds", "items")}
    chats = body.get("messages")
    if isinstance(chats, list) and chats and isinstance(chats[0], list):
        prompts["messages"] = len(chats)
    field = max(prompts, key=lambda name: prompts[name])
    copies = answers_each(body)
    if prompts[field] * copies > most:
        each = f", {copies} answers each" if copies > 1 else ""
        raise BadRequestError(
            f"{prompts[field]} prompts{each}: one request may ask for at most {most} answers; send several requests",
            param="n" if copies > 1 else field,
        )


def _several(prompt: Any) -> int:
    several = isinstance(prompt, list) and any(isinstance(one, str | list) for one in prompt[:1])
    return len(prompt) if several else 1


def _check_depth(body: dict[str, Any]) -> None:
    """Raise BadRequestError for a body nested too deep for recursive code here or in an engine."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH + 1):
        inner = (one for outer in level for one in (outer.values() if isinstance(outer, dict) else outer))
        level = [one for one in inner if isinstance(one, dict | list)]
        if not level:
            return
    raise BadRequestError(f"the body has more than {MAX_DEPTH} levels of nesting; reduce them")


async def read_body(request: Request, max_body_bytes: int, timeout_s: float) -> bytes:
    """Return the body. Raises BadRequestError if it is larger, or does not arrive in time (408)."""
    length = request.headers.get("content-length", "0")
    chunks = bytearray()
    too_large = length.isdigit() and int(length) > max_body_bytes
    if not too_large:
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in request.stream():
                    chunks += chunk
                    if too_large := len(chunks) > max_body_bytes:
                        break
        except TimeoutError:
            message = f"the body did not arrive within {timeout_s:g} s"
            raise BadRequestError(message, status=HTTPStatus.REQUEST_TIMEOUT) from None
    if too_large:
        raise BadRequestError(
            f"the body is larger than {max_body_bytes} bytes; send a smaller one",
            status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        )
    return bytes(chunks)
