"""Which lists of prompts are split, and the requests of their prompts."""

import json

import pytest

from actors.request import Endpoint
from actors.router.client_request import ClientRequest
from actors.router.prompt_lists.split import begun, parent_id, split


def request(body: object, endpoint: Endpoint = "/v1/completions", **headers: str) -> ClientRequest:
    given = tuple((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return ClientRequest(endpoint, given, raw, json.loads(raw))


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"prompt": ["a", "b"]}, [["a"], ["b"]]),
        ({"prompt": ["a", ""]}, [["a"], [""]]),
        ({"prompt": ["a", "b"], "n": 1, "echo": False}, [["a"], ["b"]]),
        ({"prompt": [[1, 2], [3]]}, [[[1, 2]], [[3]]]),
        ({"prompt": ["a"]}, []),
        ({"prompt": "a"}, []),
        ({"prompt": [1, 2]}, []),
        ({"prompt": []}, []),
        ({"prompt": ["a", [1]]}, []),
        ({"prompt": ["a", 1]}, []),
        ({"prompt": [[1], []]}, []),
        ({"prompt": [[1], [True]]}, []),
        ({"prompt": ["a", "b"], "n": 2}, [["a"], ["b"]]),
        ({"prompt": ["a", "b"], "n": "2"}, []),
        ({"prompt": ["a", "b"], "echo": True}, []),
        ({"prompt": ["a", "b"], "prompt_logprobs": 0}, []),
        ({"prompt": ["a", "b"], "use_beam_search": True}, []),
        ({"prompt": ["a", "b"], "prompt_embeds": "AAAA"}, []),
        ({"prompt": ["a", "b"], "stream": "false"}, []),
        ({}, []),
    ],
)
def test_split(body, prompts):
    """A list is split if engine pairs can serve each prompt, and vLLM would accept the list."""
    found = split(request(body, x_request_id="r"))
    assert [one.body["prompt"] for one in found] == prompts
    assert [json.loads(one.raw) for one in found] == [{**body, "prompt": prompt} for prompt in prompts]
    assert [one.request_id for one in found] == [f"r-{index}" for index in range(len(prompts))]
    assert all(one.sequences == body.get("n", 1) for one in found)
    assert [one.part for one in found] == [index > 0 for index in range(len(prompts))]


@pytest.mark.parametrize("raw", [b'"a"', b'"\\ud800"'], ids=["copied", "encoded again"])
def test_copies_of_the_other_fields_are_limited(raw):
    """A list whose requests would be larger than one body together stays one request."""
    prompts = b", ".join([raw] * 10)
    asked = request(b'{"prompt": [%s], "user": "%s"}' % (prompts, b"x" * 1000))
    assert len(split(asked, 10_500)) == 10
    assert split(asked, 10_000) == []
    long = request(b'{"prompt": [%s], "user": "u"}' % prompts.replace(raw, raw[:-1] + b"x" * 1000 + b'"'))
    assert len(split(long, 1000)) == 10, "the prompts themselves are not copied"


def test_other_endpoints_have_no_list():
    assert split(request({"prompt": ["a", "b"]}, "/tokenize")) == []


def test_the_clients_encoding_is_kept():
    """Prompts and numbers keep their encoding; other headers stay."""
    raw = b'{"prompt": ["\\u0061\\ud83d\\ude00", "b"], "temperature": 1e-1, "seed": 123456789012345678}'
    first, second = split(request(raw, x_request_id="r", traceparent="t"))
    assert b'"\\u0061\\ud83d\\ude00"' in first.raw
    assert b"1e-1" in second.raw
    assert first.headers == ((b"traceparent", b"t"), (b"x-request-id", b"r-0"))


def test_a_lone_surrogate():
    """msgspec cannot read a lone surrogate; the split requests still contain it."""
    first, _ = split(request(b'{"prompt": ["\\ud800", "b"]}'))
    assert json.loads(first.raw) == {"prompt": ["\ud800"]}


def test_the_id_of_the_answer():
    """The answer has the id of the header, else of the body, as in vLLM."""
    assert parent_id(request({"request_id": "b"}, x_request_id="h")) == "h"
    assert parent_id(request({"request_id": "b"})) == "b"
    assert parent_id(request({"request_id": 5})) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_has_its_time_from_its_own_beginning(stream):
    """A stream's timeout begins with the stream; that of a whole answer with the list's arrival."""
    asked = request({"prompt": ["a", "b"], "stream": stream})
    assert (begun(asked).arrived_at > asked.arrived_at) == stream
