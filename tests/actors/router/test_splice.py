"""Whole events, each once, from any sequence of engines."""

import pytest

from actors.router.splice import Splice
from actors.telemetry.router_metrics import RouterMetrics


def event(index: int, created: int = 1) -> bytes:
    return f'data: {{"id":"a","created":{created},"choices":[{{"text":"{index}"}}]}}\n\n'.encode()


def splice() -> Splice:
    return Splice(True, RouterMetrics())


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
def test_pieces_of_any_size_become_whole_events(size):
    """Each piece ends at an event's end; nothing is lost or added."""
    data = b"".join(event(index) for index in range(5)) + b"data: [DONE]\n\n"
    stream, passed = splice(), b""
    for begin in range(0, len(data), size):
        some = stream.feed(data[begin : begin + size])
        assert some == b"" or some.endswith(b"\n\n")
        passed += some
    assert (passed, stream.sent, stream.done) == (data, 6, True)


def test_comments_are_passed_on_and_not_counted():
    """vLLM's keep-alive comments are passed on at once."""
    stream = splice()
    assert stream.feed(b": ping\n\n" + event(0)) == b": ping\n\n" + event(0)
    stream.restart()
    assert stream.feed(event(0) + b": ping\n\n" + event(1)) == b": ping\n\n" + event(1)
    assert stream.sent == 2


def test_text_that_looks_like_a_date_is_left_alone():
    """Within a string, JSON escapes the quotes."""
    stream = splice()
    stream.feed(event(0, created=1))
    stream.restart()
    stream.feed(event(0, created=2))
    said = b'data: {"id":"a","created":2,"choices":[{"text":"{\\"created\\":3}"}]}\n\n'
    assert stream.feed(said) == said.replace(b'"created":2', b'"created":1')


@pytest.mark.parametrize("last", ["response.completed", "response.failed", "error", "message_stop"])
def test_the_responses_api_ends_without_a_mark(last):
    """The last event of a response ends its stream; the same text within a string does not."""
    stream = splice()
    stream.feed(b'event: response.output_text.delta\ndata: {"delta": "event: response.completed"}\n\n')
    assert not stream.done
    stream.feed(f'event: {last}\ndata: {{"type": "{last}"}}\n\n'.encode())
    assert stream.done


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (b'data: {"error": {"message": "m"}}\n\n', b"data: [DONE]\n\n"),
        (b'event: error\ndata: {"type": "error"}\n\n', b""),
    ],
)
@pytest.mark.parametrize("repeats", [True, False])
def test_an_error_is_no_repetition_and_ends_the_stream(error, end, repeats):
    """An engine that fails while it repeats events has not sent the event at that position. No
    other engine continues the stream, even if the engine dies before `[DONE]`.
    """
    stream = splice()
    stream.feed(event(0) + event(1))
    if repeats:
        stream.restart()
    assert stream.feed((event(0) if repeats else b"") + error) == error + end
    assert stream.done
    assert stream.feed(b"data: [DONE]\n\n") == b""
    stream.restart()
    assert stream.feed(b"".join(map(event, range(5)))) == b""
