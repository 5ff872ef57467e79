"""Bodies of the requests to both engines, as tables."""

import json
from typing import Any

import msgspec
import pytest

from actors.engine.split_bodies import decode_body, prefill_body
from actors.large_json import as_written, write
from actors.request import Endpoint, ProducerAddress

COMPLETIONS: Endpoint = "/v1/completions"
CHAT: Endpoint = "/v1/chat/completions"
RESPONSES: Endpoint = "/v1/responses"
MESSAGES: Endpoint = "/v1/messages"
TURN = [{"role": "user", "content": "hi"}]
ADDRESS = {"remote_engine_id": "e1", "remote_host": "10.0.0.1", "remote_port": 4711, "tp_size": 2}
PRODUCER = msgspec.convert(ADDRESS, ProducerAddress)
"""As an engine announces it: msgspec does not store a field that has its default."""


TRANSFER = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("endpoint", "shaping", "output_only", "leg"),
    [
        (
            COMPLETIONS,
            {"model": "m", "prompt": "text", "truncate_prompt_tokens": 50, "cache_salt": "s"},
            {"max_tokens": 100, "min_tokens": 5, "logprobs": 5, "stop": ["x"], "temperature": 0.7},
            {"max_tokens": 1, "n": 1},
        ),
        (
            # Fields that a chat template may read stay.
            CHAT,
            {
                "messages": TURN,
                "tools": TOOLS,
                "tool_choice": "auto",
                "response_format": {"type": "json_object"},
                "chat_template_kwargs": {"enable_thinking": False},
                "add_generation_prompt": True,
                "documents": [],
            },
            {"max_completion_tokens": 50, "top_logprobs": 2, "logprobs": True},
            {"max_tokens": 1, "max_completion_tokens": 1, "n": 1},
        ),
        (
            RESPONSES,
            {"input": TURN, "instructions": "be brief", "tools": TOOLS, "truncation": "auto"},
            {"max_output_tokens": 50, "include": ["message.output_text.logprobs"], "top_logprobs": 3, "store": True},
            {"max_output_tokens": 1, "store": False},
        ),
        (
            MESSAGES,
            {
                "system": "be brief",
                "messages": TURN,
                "tools": [{"name": "f", "input_schema": {}}],
                "tool_choice": {"type": "any"},
                "thinking": {"type": "enabled", "budget_tokens": 2000},
                "output_config": {"effort": "low"},
            },
            {"max_tokens": 3000, "stop_sequences": ["x"], "top_k": 3, "temperature": 1.0},
            {"max_tokens": 1},
        ),
    ],
    ids=["completion", "chat", "response", "message"],
)
def test_prefill_body(
    endpoint: Endpoint, shaping: dict[str, Any], output_only: dict[str, Any], leg: dict[str, Any]
) -> None:
    """The leg has what shapes the prompt, one token, and the transfer. The client's body stays."""
    body = shaping | output_only | {"stream": True, "stream_options": {"include_usage": True}}
    before = dict(body)
    expected = shaping | leg | {"stream": False, "temperature": 0.0, "kv_transfer_params": TRANSFER}
    assert prefill_body(endpoint, body, "t") == expected
    assert body == before


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        (b'{"type": "tool", "name": "f"}', b'{"type": "any"}'),
        (b'{"type": "tool", "name": "f", "disable_parallel_tool_use": true}', b'{"type": "any"}'),
        *(
            (other, other)
            for other in (
                *(b'{"type": "auto"}', b'{"type": "none"}', b'{"type": 5}', b'"tool"', b"null"),
                # The engine validates them; msgspec copies these values, but cannot decode them.
                *(
                    b'{"type": "auto", "x": "\xed\xa0\x80"}',
                    b'{"type": "any", "x": 1e999}',
                    b'{"type": "\xed\xa0\x80"}',
                ),
            )
        ),
    ],
)
def test_prefill_body_of_a_named_tool(choice: bytes, sent: bytes) -> None:
    """One token of a named tool's arguments is not JSON, and vLLM would answer 400."""
    raw = b'{"messages": [], "tool_choice": ' + choice + b"}"
    for body in (as_written(raw), json.loads(raw)):
        assert json.loads(write(prefill_body(MESSAGES, body, "t")))["tool_choice"] == json.loads(sent)
    assert prefill_body(CHAT, json.loads(raw), "t")["tool_choice"] == json.loads(choice)


def test_decode_body_is_the_clients_request_and_the_transfer():
    """No field of the client changes."""
    body = {"model": "m", "prompt": "text", "n": 1, "stream": True, "stop": ["x"]}
    leg = decode_body(body, "t1", PRODUCER)
    assert leg.pop("kv_transfer_params") == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t1",
        "remote_engine_id": "e1",
        "remote_host": "10.0.0.1",
        "remote_port": 4711,
        "tp_size": 2,
    }
    assert leg == body
