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
        (OverloadedError("full", 12.3), 429, "RateLimitError", "13"),
        (UnavailableError("gone"), 503, "ServiceUnavailableError", "7"),
        (CannotResumeError("n > 1"), 503, "ServiceUnavailableError", "7"),
        (DeadlineError("late"), 504, "TimeoutError", None),
        (ZeroDivisionError("secret"), 500, "InternalServerError", None),
    ],
)
def test_an_errors_response(error, status, kind, retry_after):
    response = error_response(error, retry_after_s=7)
    body = json.loads(bytes(response.body))["error"]
    assert (response.status_code, body["code"], body["type"]) == (status, status, kind)
    assert response.headers.get("retry-after") == retry_after
    assert body["param"] == ("n" if status == 400 else None)

    assert b"secret" not in response.body, "the log has the exception's text; the client does not receive it"


@pytest.mark.parametrize(
    ("endpoint", "kind", "end", "said"),
    [
        ("/v1/completions", None, "data: [DONE]\n\n", {"error": {"code": 503, "param": None, "message": "gone"}}),
        ("/v1/responses", "error", "", {"type": "error", "message": "gone", "param": None}),
        ("/v1/messages", "error", "", {"type": "error", "error": {"message": "gone"}}),
    ],
)
def test_an_error_within_a_stream_ends_it(endpoint, kind, end, said):
    """The event has the form and the end mark that the endpoint's clients read until."""
    event, rest = error_event(UnavailableError("gone"), endpoint).decode().split("\n\n", 1)
    name, _, data = event.rpartition("data: ")
    found = json.loads(data)
    kinds = [found["error"].pop("type")] if "error" in found else [found.pop("code")]
    assert (name, rest, kinds) == (f"event: {kind}\n" if kind else "", end, ["ServiceUnavailableError"])
    assert found == said


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (OverloadedError("full"), 429, {"type": "error", "error": {"type": "RateLimitError", "message": "full"}}),
        (
            MalformedError("no JSON", "body"),
            400,
            {"error": {"message": "no JSON", "type": "Bad Request", "param": "body", "code": 400}},
        ),
    ],
    ids=["Anthropic's form", "malformed: as vLLM's web framework"],
)
def test_an_error_of_the_messages_api(error, status, said):
    response = error_response(error, 7, "/v1/messages")
    assert (response.status_code, json.loads(bytes(response.body))) == (status, said)
    assert response.headers.get("retry-after") == ("7" if status == 429 else None)
