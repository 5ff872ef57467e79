"""Our errors as OpenAI clients receive them."""

import json

import pytest

from actors.errors import CannotResumeError, DeadlineError, OverloadedError, UnavailableError
from app.http.errors import BadRequestError, MalformedError, error_event, error_response


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (BadRequestError("bad", param="n"), 400, "BadRequestError", None),
        (BadRequestError("big", status=413), 413, "RequestTooLargeError", None),
        (OverloadedError("full"), 429, "RateLimitError", "7"),
        (UnavailableError("gone"), 503, "ServiceUnavailableError", "7"),
        (CannotResumeError("n > 1"), 503, "ServiceUnavailableError", "7"),
        (DeadlineError("late"), 504, "TimeoutError", None),
        (ZeroDivisionError("secret"), 500, "InternalServerError", None),
    ],
)
def test_an_errors_response(error, status, kind, retry_after):
    """An error has status, type and, if a retry may help, Retry-After."""
    response = error_response(error, retry_after_s=7)
    body = json.loads(bytes(response.body))["error"]
    assert (response.status_code, body["code"], body["type"]) == (status, status, kind)
    assert response.headers.get("retry-after") == retry_after
    assert body["param"] == ("n" if status == 400 else None)


def test_an_internal_error_says_nothing_of_its_inside():
    """The log has the exception's text; the client does not receive it."""
    assert b"secret" not in error_response(ZeroDivisionError("secret"), 1).body


def test_an_error_within_a_stream_ends_it():
    """[DONE] follows the error, because clients read until [DONE]."""
    first, last, rest = error_event(UnavailableError("gone")).decode().split("\n\n")
    assert json.loads(first.removeprefix("data: "))["error"]["code"] == 503
    assert (last, rest) == ("data: [DONE]", "")


def test_an_error_within_a_response_of_the_responses_api():
    """One event that its clients know; there is no end mark."""
    event, rest = error_event(UnavailableError("gone"), "/v1/responses").decode().split("\n\n")
    kind, data = event.split("\n")
    said = json.loads(data.removeprefix("data: "))
    assert (kind, rest) == ("event: error", "")
    assert said == {"type": "error", "code": "ServiceUnavailableError", "message": "gone", "param": None}


def test_an_error_of_the_messages_api():
    """The error has Anthropic's form, with vLLM's type."""
    response = error_response(OverloadedError("full"), 7, "/v1/messages")
    said = {"type": "error", "error": {"type": "RateLimitError", "message": "full"}}
    assert (response.status_code, json.loads(bytes(response.body))) == (429, said)
    assert response.headers["retry-after"] == "7"


def test_a_malformed_request_to_the_messages_api():
    """The error has the form that vLLM's web framework sends before the endpoint's code runs."""
    body = json.loads(bytes(error_response(MalformedError("no JSON", "body"), 1, "/v1/messages").body))
    assert body == {"error": {"message": "no JSON", "type": "Bad Request", "param": "body", "code": 400}}


def test_an_error_within_a_stream_of_the_messages_api():
    """One event that its clients know; there is no end mark."""
    event, rest = error_event(UnavailableError("gone"), "/v1/messages").decode().split("\n\n")
    kind, data = event.split("\n")
    said = {"type": "error", "error": {"type": "ServiceUnavailableError", "message": "gone"}}
    assert (kind, rest, json.loads(data.removeprefix("data: "))) == ("event: error", "", said)
