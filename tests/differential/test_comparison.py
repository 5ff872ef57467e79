"""The comparison without servers: assembled answers, detected differences, and ignored fields."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from tests.campaigns.differential.answers import MUST_DIFFER, Reply, read
from tests.campaigns.differential.campaign import all_cases
from tests.campaigns.differential.compare import differences, event_groups

SSE = "text/event-stream; charset=utf-8"


def whole(**more: Any) -> Reply:
    choice = {"index": 0, "text": "093", "token_ids": [1, 2], "finish_reason": "stop", "logprobs": [-0.5, -1e-3]}
    body = {"id": "cmpl-0123456789abcdef0123", "created": 1, "choices": [choice], "usage": {"prompt_tokens": 5}, **more}
    return Reply(200, "application/json", json.dumps(body).encode())


def chunks(*texts: str, finish: str = "stop", usage: int = 3, ended: bool = True, **more: Any) -> Reply:
    base = {"id": "cmpl-0123456789abcdef0123", "created": 7, "model": "m"}
    events: list[dict[str, Any]] = []
    for number, text in enumerate(texts):
        last = number == len(texts) - 1
        choice = {"index": 0, "text": text, "token_ids": list(text.encode()), "finish_reason": finish if last else None}
        events.append({**base, "choices": [{**choice, **more}]})
    events.append({**base, "choices": [], "usage": {"completion_tokens": usage}})
    frames = [json.dumps(event) for event in events] + ["[DONE]"] * ended
    return Reply(200, SSE, "".join(f"data: {frame}\n\n" for frame in frames).encode())


def named(*events: tuple[str, dict[str, Any]]) -> Reply:
    frames = (f"event: {kind}\ndata: {json.dumps({'type': kind, **data})}\n\n" for kind, data in events)
    return Reply(200, SSE, "".join(frames).encode())


def lines(one: Reply, other: Reply) -> list[str]:
    return differences(read(one), read(other))


CHANGES: list[dict[str, Any]] = [
    {"id": "chatcmpl-fedcba9876543210fedc"},
    {"id": None},
    {"created": "now"},
    {"system_fingerprint": "there"},
    {"usage": {"prompt_tokens": 6}},
    {"usage": {"prompt_tokens": 5, "prompt_tokens_details": None}},
    {"choices": []},
    {"choices": [{"index": 0, "text": "094"}]},
    {"extra": None},
]
SEEN: list[tuple[Reply, Reply]] = [
    *((whole(), whole(**change)) for change in CHANGES),
    (whole(n=1), whole(n=True)),
    (whole(n=1), whole(n=1.0)),
    (whole(logprobs=[-2.5]), whole(logprobs=[-2.49989])),  # further than another order of addition
    (whole(logprobs=[-2.5]), whole(logprobs=[-3.0])),
    *((chunks("a", "b", "cd"), other) for other in (
        chunks("a", "b", "ce"),
        chunks("a", "b", "cd", finish="length"),
        chunks("a", "b", "cd", usage=4),
        chunks("a", "b", "cd", ended=False),
        chunks("a", "b", "cd", stop_reason=None),
        Reply(500, SSE, chunks("a", "b", "cd").body),
        Reply(200, "application/json", chunks("a", "b", "cd").body),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SEEN)
def test_differences_are_seen(one: Reply, other: Reply) -> None:
    assert lines(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (whole(), whole(id="cmpl-fedcba9876543210fedc", created=99)),
        (whole(system_fingerprint="a"), whole(system_fingerprint="b")),
        (whole(kv_transfer_params=None), whole(kv_transfer_params={"a": 1})),
        (whole(logprobs=[-2.5]), whole(logprobs=[-2.49991])),
        (chunks("a", "b", "cd"), chunks("abcd")),  # where a stream is cut does not matter
    ],
)
def test_what_must_differ_may(one: Reply, other: Reply) -> None:
    """Each ignored field has a reason."""
    assert lines(one, other) == []
    assert all(reason for _, reason in MUST_DIFFER.values())


def test_what_vllm_appends_to_joined_arguments_does_not_matter() -> None:
    def answer(arguments: str) -> Reply:
        return whole(tool_calls=[{"function": {"name": "weather", "arguments": arguments}}])

    assert lines(answer("false"), answer("false{}")) == []
    assert lines(answer("false"), answer("true{}"))
    assert lines(answer("{}"), answer(""))


@pytest.mark.parametrize("of_chat", [True, False])
def test_which_forbidden_tokens_are_alternatives_does_not_matter(of_chat: bool) -> None:
    def answer(*alternatives: tuple[str, float]) -> Reply:
        if of_chat:
            top = [[{"token": token, "logprob": logprob} for token, logprob in alternatives]]
            return whole(logprobs={"content": [{"top_logprobs": one} for one in top]})
        return whole(logprobs={"top_logprobs": [dict(alternatives)]})

    one = answer(("a", -0.5), ("b", -9999.0))
    assert lines(one, answer(("a", -0.5), ("c", -9999.0))) == []
    assert lines(one, answer(("a", -0.5), ("c", -9.0)))
    assert lines(one, answer(("c", -0.5), ("b", -9999.0)))
    assert lines(one, answer(("a", -0.5)))


def test_events_that_say_the_same_form_groups() -> None:
    one = chunks("a", "b", "cd")  # three events of text, usage, end mark
    assert event_groups(one, Reply(200, SSE, one.body.replace(b'"created": 7', b'"created": 8'))) == [(1, 1)] * 5
    assert event_groups(one, chunks("a", "bcd")) == [(1, 1), (2, 1), (1, 1), (1, 1)]
    assert event_groups(chunks("abc", "d"), one) == [(2, 3), (1, 1), (1, 1)]


@pytest.mark.parametrize(
    "other", [chunks("a", "b", "cd", usage=4), chunks("a", "b", "cd", ended=False), chunks("a", "b", "ce")]
)
def test_events_that_do_not_correspond_have_a_group_without_equal(other: Reply) -> None:
    assert not all(event_groups(chunks("a", "b", "cd"), other)[-1])


@pytest.mark.parametrize("field", [b'"created": 7', b'"id": "cmpl-0123456789abcdef0123"'])
def test_a_value_that_changes_within_a_stream_is_seen(field: bytes) -> None:
    one = chunks("a", "b", "cd")
    changed = field[:-2] + b"9" + field[-1:] if field.endswith(b'"') else field[:-1] + b"9"
    assert lines(one, Reply(200, SSE, one.body.replace(field, changed, 1)))


def test_named_events_are_put_together_too() -> None:
    kind = "response.output_text.delta"
    one = named(
        ("response.created", {}), (kind, {"delta": "a", "logprobs": [1]}), (kind, {"delta": "b", "logprobs": [2]})
    )
    other = named(("response.created", {}), (kind, {"delta": "ab", "logprobs": [1, 2]}))
    assert lines(one, other) == []
    assert lines(one, named(("response.created", {}), (kind, {"delta": "ab", "logprobs": [1, 3]})))
    assert lines(one, named((kind, {"delta": "ab", "logprobs": [1, 2]})))


@pytest.mark.parametrize(
    ("last", "equal"), [({"token": "</s>"}, True), ({"token": "b"}, False)], ids=["without text", "with text"]
)
def test_the_logprobs_of_a_last_token_without_text_do_not_count(last: dict[str, str], equal: bool) -> None:
    def response(logprobs: list[dict[str, str]]) -> Reply:
        kind = "response.output_text"
        return named(
            (f"{kind}.delta", {"delta": "ab", "logprobs": logprobs}),
            (f"{kind}.done", {"text": "ab", "logprobs": logprobs}),
        )

    first = {"token": "ab"}
    assert (lines(response([first]), response([first, last])) == []) == equal


def test_an_error_is_compared_whole() -> None:
    error = {"message": "no", "type": "BadRequestError", "param": "n", "code": 400}
    one = Reply(400, "application/json", json.dumps({"error": error}).encode())
    for field in error:
        other = Reply(400, "application/json", json.dumps({"error": {**error, field: "other"}}).encode())
        assert lines(one, other), field


def test_the_cases_are_many_and_each_is_named_once() -> None:
    cases = list(all_cases())
    assert len(cases) > 1000
    assert [name for name, count in Counter(case.name for _, case in cases).items() if count > 1] == []


def test_a_refusal_within_a_stream_is_recognised() -> None:
    error = Reply(200, SSE, b'data: {"error": {"message": "no"}}\n\ndata: [DONE]\n\n')
    assert error.refuses_in_stream
    assert not chunks("a", "b").refuses_in_stream
    assert not Reply(400, "application/json", error.body).refuses_in_stream
