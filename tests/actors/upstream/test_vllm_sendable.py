"""Values that JSON has and msgpack lacks, in fields that a client may set."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from actors.upstream.vllm_sendable import check_sendable

HALF = "\ud800"


@pytest.mark.parametrize(
    ("prompt", "params", "options", "message"),
    [
        ({}, {"stop": [HALF]}, {}, "`stop` must not contain lone surrogates"),
        ({}, {"stream_interval": 2**64}, {}, "`stream_interval` must fit in a 64-bit integer"),
        ({}, {"extra_args": {"deep": [{"er": HALF}]}}, {}, "`extra_args` must not contain lone surrogates"),
        ({}, {"extra_args": {HALF: 1}}, {}, "`extra_args` must not contain lone surrogates"),
        ({"cache_salt": HALF}, {}, {}, "`cache_salt` must not contain lone surrogates"),
        ({}, {}, {"priority": -(2**63) - 1}, "`priority` must fit in a 64-bit integer"),
        ({}, {}, {"trace_headers": {"traceparent": HALF}}, "`trace_headers` must not contain lone"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(
    prompt: Any, params: dict[str, Any], options: Any, message: str
) -> None:
    """The engine refuses the value before it registers the request."""
    with pytest.raises(VLLMValidationError, match=message):
        check_sendable(prompt, SamplingParams(**params), options)


def test_what_can_be_sent() -> None:
    """vLLM can send the largest numbers, any text, and values that it encodes itself."""
    params = SamplingParams(stop=["\U0001f511"], stream_interval=2**64 - 1, extra_args={"x": -(2**63), "y": object()})
    check_sendable({"cache_salt": "\U0001f511"}, params, {"priority": 1, "lora_request": object()})
    check_sendable("text " + HALF, SamplingParams(), {})
