"""Bodies of the requests to both engines, as tables."""

import json

import pytest

from actors.engine.split_bodies import OUTPUT_ONLY, decode_body, prefill_body
from actors.large_json import as_written, write
from actors.request import Endpoint, ProducerAddress

COMPLETIONS: Endpoint = "/v1/completions"
CHAT: Endpoint = "/v1/chat/completions"
RESPONSES: Endpoint = "/v1/responses"
MESSAGES: Endpoint = "/v1/messages"
TURN = [{"role": "user", "content": "hi"}]
PRODUCER = ProducerAddress(remote_engine_id="e1", remote_host="10.0.0.1", remote_port=4711, tp_size=2)


def test_prefill_body_of_a_completion():
    """The leg has the prompt, one token, the transfer, and no field that shapes only output."""
    body = {
        "model": "m",
        "prompt": "text",
        "max_tokens": 100,
        "min_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 5,
        "stop": ["x"],
        "temperature": 0.7,
        "truncate_prompt_tokens": 50,
        "cache_salt": "s",
    }
    assert prefill_body(COMPLETIONS, body, "t1") == {
        "model": "m",
        "prompt": "text",
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "temperature": 0.0,
        "truncate_prompt_tokens": 50,
        "cache_salt": "s",
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": "t1",
        },
    }


def test_prefill_body_of_a_chat_keeps_what_shapes_the_prompt():
    """Fields that a chat template may read stay; both token limits are one."""
    shaping = {
        "messages": TURN,
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "auto",
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "add_generation_prompt": True,
        "documents": [],
    }
    leg = prefill_body(CHAT, {**shaping, "max_completion_tokens": 50, "top_logprobs": 2, "logprobs": True}, "t")
    assert {key: leg[key] for key in shaping} == shaping
    assert leg["max_tokens"] == leg["max_completion_tokens"] == 1
    assert not OUTPUT_ONLY & leg.keys()


def test_prefill_body_of_a_response():
    """The leg is not stored, its token limit has another name, and fields of the prompt stay."""
    shaping = {
        "input": TURN,
        "instructions": "be brief",
        "tools": [{"type": "function", "name": "f"}],
        "truncation": "auto",
    }
    body = {**shaping, "max_output_tokens": 50, "stream": True, "include": ["message.output_text.logprobs"]}
    leg = prefill_body(RESPONSES, {**body, "top_logprobs": 3, "store": True}, "t")
    assert leg.pop("kv_transfer_params")["transfer_id"] == "t"
    assert leg == {**shaping, "max_output_tokens": 1, "stream": False, "store": False, "temperature": 0.0}


def test_prefill_body_of_a_message():
    """The leg keeps fields that shape the prompt, such as `thinking` and `system`, and drops stop
    sequences.
    """
    shaping = {
        "system": "be brief",
        "messages": TURN,
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "any"},
        "thinking": {"type": "enabled", "budget_tokens": 2000},
        "output_config": {"effort": "low"},
    }
    body = {**shaping, "max_tokens": 3000, "stream": True, "stop_sequences": ["x"], "top_k": 3, "temperature": 1.0}
    leg = prefill_body(MESSAGES, body, "t")
    assert leg.pop("kv_transfer_params")["do_remote_decode"] is True
    assert leg == {**shaping, "max_tokens": 1, "stream": False, "temperature": 0.0}


@pytest.mark.parametrize("encoded", [False, True])
@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ({"type": "tool", "name": "f"}, {"type": "any"}),
        ({"type": "tool", "name": "f", "disable_parallel_tool_use": True}, {"type": "any"}),
        ({"type": "auto"}, {"type": "auto"}),
        ({"type": "none"}, {"type": "none"}),
        ({"type": 5}, {"type": 5}),
        ("tool", "tool"),
        (None, None),
    ],
)
def test_prefill_body_of_a_named_tool(choice, sent, encoded):
    """One token of a named tool's arguments is not JSON, and vLLM would answer 400."""
    body = {"messages": TURN, "tool_choice": choice}
    leg = prefill_body(MESSAGES, as_written(json.dumps(body).encode()) if encoded else body, "t")
    assert json.loads(write(leg))["tool_choice"] == sent
    leg = prefill_body(CHAT, body, "t")
    assert leg["tool_choice"] == choice


@pytest.mark.parametrize(
    "choice", [b'{"type": "auto", "x": "\xed\xa0\x80"}', b'{"type": "any", "x": 1e999}', b'{"type": "\xed\xa0\x80"}']
)
def test_a_tool_choice_that_only_python_can_decode(choice):
    """The engine validates `tool_choice`; msgspec copies these values, but cannot decode them."""
    raw = b'{"messages": [], "tool_choice": ' + choice + b"}"
    leg = prefill_body(MESSAGES, as_written(raw), "t")
    assert json.loads(write(leg))["tool_choice"] == json.loads(choice)


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


def test_the_clients_body_is_left_alone():
    """Legs are new objects: the router logs and retries from the original."""
    body = {"prompt": "text", "stream": True}
    prefill_body(COMPLETIONS, body, "t")
    decode_body(body, "t", PRODUCER)
    assert body == {"prompt": "text", "stream": True}


def test_a_producer_is_read_from_a_connectors_reply():
    """Other keys of the reply are ignored; a missing one is an error."""
    reply = {"remote_engine_id": "e", "remote_host": "h", "remote_port": 1, "tp_size": 1, "transfer_id": "x"}
    assert ProducerAddress.from_params(reply) == ProducerAddress("e", "h", 1, 1)
    with pytest.raises(KeyError, match="remote_port"):
        ProducerAddress.from_params({"remote_engine_id": "e", "remote_host": "h"})
