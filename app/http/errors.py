"""Error responses and events in the formats of OpenAI and Anthropic, and their HTTP status."""

import json
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import JSONResponse

from actors.errors import (
    CannotResumeError,
    DeadlineError,
    LastEngineError,
    NoModelNamedError,
    OverloadedError,
    RefusedError,
    UnavailableError,
    UnknownEngineError,
    UnknownModelError,
)
from actors.request import Endpoint

ERROR_TYPES = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.UNAUTHORIZED: "AuthenticationError",
    HTTPStatus.NOT_FOUND: "NotFoundError",
    HTTPStatus.METHOD_NOT_ALLOWED: "MethodNotAllowedError",
    HTTPStatus.REQUEST_TIMEOUT: "RequestTimeoutError",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "RequestTooLargeError",
    HTTPStatus.TOO_MANY_REQUESTS: "RateLimitError",
    HTTPStatus.INTERNAL_SERVER_ERROR: "InternalServerError",
    HTTPStatus.SERVICE_UNAVAILABLE: "ServiceUnavailableError",
    HTTPStatus.GATEWAY_TIMEOUT: "TimeoutError",
}
"""The `type` of an error by status; vLLM's names where vLLM has one."""


ANTHROPIC: frozenset[Endpoint] = frozenset({"/v1/messages", "/v1/messages/count_tokens"})
"""Endpoints of Anthropic's API."""


class BadRequestError(Exception):
    """A request that the router refuses with HTTP `status`.

    `param` names the invalid field; None if there is no such field.
    """

    kind: str | None = None
    """The error's `type`; None for the type in ERROR_TYPES."""

    def __init__(self, message: str, param: str | None = None, status: int = HTTPStatus.BAD_REQUEST) -> None:
        super().__init__(message)
        self.param = param
        self.status = HTTPStatus(status)


class MalformedError(BadRequestError):
    """A malformed request. As in vLLM, its `type` differs from that of other invalid requests."""

    kind = HTTPStatus.BAD_REQUEST.phrase


def error_body(status: HTTPStatus, message: str, param: str | None = None, kind: str | None = None) -> dict[str, Any]:
    kind = kind or ERROR_TYPES.get(status, status.phrase)
    # A client's text in the message may have lone surrogates, which a response cannot encode.
    message = message.encode(errors="backslashreplace").decode()
    return {"error": {"message": message, "type": kind, "param": param, "code": int(status)}}


def refusal(status: HTTPStatus, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(error_body(status, message), status_code=status, headers=headers)


def _anthropic(body: dict[str, Any]) -> dict[str, Any]:
    """Convert an error from OpenAI's format to Anthropic's; keep its `type`, as vLLM does."""
    return {"type": "error", "error": {key: body["error"][key] for key in ("type", "message")}}


def status_of(error: Exception) -> HTTPStatus:
    match error:
        case BadRequestError():
            return error.status
        case UnknownModelError() | UnknownEngineError():
            return HTTPStatus.NOT_FOUND
        case LastEngineError():
            return HTTPStatus.CONFLICT
        case NoModelNamedError():
            return HTTPStatus.BAD_REQUEST
        case OverloadedError() | RefusedError():
            return HTTPStatus.TOO_MANY_REQUESTS
        case UnavailableError() | CannotResumeError():
            return HTTPStatus.SERVICE_UNAVAILABLE
        case DeadlineError():
            return HTTPStatus.GATEWAY_TIMEOUT
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR


def message_of(error: Exception) -> str:
    """Return the message for the client; for internal errors, a reference to the log."""
    if status_of(error) is HTTPStatus.INTERNAL_SERVER_ERROR:
        return "internal error; the router's log has the details"
    return str(error)


def _body(error: Exception) -> dict[str, Any]:
    param, kind = (error.param, error.kind) if isinstance(error, BadRequestError) else (None, None)
    if isinstance(error, UnknownModelError | NoModelNamedError):
        param = "model"
    return error_body(status_of(error), message_of(error), param, kind)


def error_response(error: Exception, retry_after_s: int, endpoint: str = "/v1/completions") -> JSONResponse:
    """Return the response of `endpoint` for `error`.

    ``retry_after_s``  least Retry-After of status 429 and 503
    """
    status, body, headers = status_of(error), _body(error), {}
    if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        estimated_s = error.retry_after_s if isinstance(error, OverloadedError) else 0.0
        headers["Retry-After"] = str(max(retry_after_s, math.ceil(estimated_s)))
    if endpoint in ANTHROPIC and not isinstance(error, MalformedError):
        # vLLM's `validation_exception_handler` answers malformed requests in OpenAI's format only
        # (vllm/entrypoints/serve/exception_handling/handlers/validation.py).
        body = _anthropic(body)
    return JSONResponse(body, status_code=status, headers=headers)


def error_event(error: Exception, endpoint: Endpoint = "/v1/completions") -> bytes:
    return late_error(_body(error), endpoint)


def late_error(body: dict[str, Any], endpoint: Endpoint) -> bytes:
    """Return the last events of a stream that ends with an error, as vLLM's `endpoint` sends them.

    ``body``  error in OpenAI's format
    """
    if endpoint == "/v1/responses":
        error = body["error"]
        said = {"type": "error", "code": error["type"], "message": error["message"], "param": error["param"]}
        return f"event: error\ndata: {json.dumps(said)}\n\n".encode()
    if endpoint in ANTHROPIC:
        return f"event: error\ndata: {json.dumps(_anthropic(body))}\n\n".encode()
    return f"data: {json.dumps(body)}\n\ndata: [DONE]\n\n".encode()
