"""The merged answer, computed by hand from vLLM's form."""

import json
from typing import Any

from actors.router.prompt_lists.merge import MergedStream, error_event, merged_body


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion, **more}


def body(index: int, text: str, counts: dict[str, Any]) -> bytes:
    choices = [{"index": 0, "text": text, "logprobs": None}]
    answer = {"id": f"cmpl-r-{index}", "created": 10 + index, "choices": choices, "usage": counts, "metrics": {"a": 1}}
    return json.dumps(answer).encode()


def chunk(index: int, text: str | None = None, created: int = 1, **more: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    event = {"id": f"cmpl-r-{index}", "created": created, "choices": choices, **more}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_a_whole_answer():
    """Choices in order of prompts, counts added, the last prompt's details, the first's time."""
    details = [{"cached_tokens": 3}, {"cached_tokens": 4}]
    parts = [body(0, "ü", usage(5, 2, prompt_tokens_details=details[0])), body(1, "b", usage(7, 1))]
    parts.append(body(2, "c", usage(1, 1, prompt_tokens_details=details[1])))
    merged = merged_body(parts, "cmpl-r")
    assert "ü".encode() in merged
    assert json.loads(merged) == {
        "id": "cmpl-r",
        "created": 10,
        "choices": [{"index": i, "text": text, "logprobs": None} for i, text in enumerate("übc")],
        "usage": usage(13, 4, prompt_tokens_details=details[1]),
        "metrics": None,
    }


def read(events: bytes) -> list[Any]:
    frames = events.decode().split("\n\n")
    assert frames.pop() == ""
    return [frame if frame == "data: [DONE]" else json.loads(frame.removeprefix("data: ")) for frame in frames]


def test_a_stream():
    """The merged stream has all events with their prompt's index, one usage and one end."""
    merged = MergedStream(2, 1, "cmpl-r")
    head = {"id": "cmpl-r", "created": 3}
    assert merged.feed(1, b": ping\n\n") == b": ping\n\n"
    assert read(merged.feed(1, chunk(1, "b", 3, usage=usage(2, 1)))) == [
        {**head, "choices": [{"index": 1, "text": "b"}], "usage": usage(2, 1)}
    ]
    assert read(merged.feed(0, chunk(0, "a", 4) + chunk(0, "c", 4))) == [
        {**head, "choices": [{"index": 0, "text": text}]} for text in "ac"
    ]
    assert merged.feed(0, chunk(0, None, 4, usage=usage(5, 2), metrics={"a": 1}) + DONE) == b""
    assert not merged.done
    last = chunk(1, None, 3, usage=usage(2, 1, prompt_tokens_details={"cached_tokens": 1})) + DONE
    assert read(merged.feed(1, last)) == [
        {**head, "choices": [], "usage": usage(7, 3, prompt_tokens_details={"cached_tokens": 1})},
        "data: [DONE]",
    ]
    assert merged.done


def test_several_choices_for_each_prompt():
    """vLLM numbers the choices of the second prompt after those of the first."""
    merged = MergedStream(2, 3, "cmpl-r")
    events = [merged.feed(stream, chunk(stream, "a").replace(b'"index": 0', b'"index": 2')) for stream in (1, 0)]
    assert [read(one)[0]["choices"][0]["index"] for one in events] == [5, 2]
    pair = json.dumps({"choices": [{"index": 0}, {"index": 1}], "usage": usage(2, 4)}).encode()
    answer = json.loads(merged_body([pair, pair], "cmpl-r"))
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"] == usage(4, 8)


def test_a_stream_without_usage():
    merged = MergedStream(2, 1, "cmpl-r")
    assert merged.feed(0, DONE) == b""
    assert merged.feed(1, DONE) == DONE


def test_an_error_ends_the_stream():
    """The merger drops all events after the error."""
    merged = MergedStream(2, 1, "cmpl-r")
    error = {"error": {"message": "no", "code": 400}}
    assert read(merged.feed(1, error_event(json.dumps(error).encode()))) == [error, "data: [DONE]"]
    assert merged.done
    assert merged.feed(0, chunk(0, "a")) == b""
