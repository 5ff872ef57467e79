"""Bodies of the requests to a prefill and a decode engine, from the client's body. Pure.

Both have transfer parameters with the same single-use transfer id.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from actors.request import TRANSFER_FIELD, Body, ProducerAddress

OUTPUT_ONLY = frozenset(
    {
        "allowed_token_ids",
        "bad_words",
        "best_of",
        "frequency_penalty",
        "ignore_eos",
        "include",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logits_processors",
        "logprob_token_ids",
        "logprobs",
        "min_p",
        "min_tokens",
        "presence_penalty",
        "repetition_penalty",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "seed",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "stream_options",
        "structured_outputs",
        "suffix",
        "thinking_token_budget",
        "top_k",
        "top_logprobs",
        "top_p",
    }
)
"""Fields that change the output and not the prompt; omitted by `prefill_body`."""


ONE_TOKEN: Mapping[str, Body] = {
    "/v1/completions": {"n": 1, "max_tokens": 1},
    "/v1/chat/completions": {"n": 1, "max_tokens": 1, "max_completion_tokens": 1},
    "/v1/responses": {"max_output_tokens": 1, "store": False},
    "/v1/messages": {"max_tokens": 1},
}
"""Fields that limit a request to one token of one choice, not stored, by endpoint."""


def prefill_body(endpoint: str, body: Body, transfer_id: str) -> dict[str, Any]:
    """Return the body for a prefill engine that only computes the prompt and keeps its KV.

    It has the client's prompt, asks for one token and no stream, and has transfer parameters.
    """
    fields = {field: value for field, value in body.items() if field not in OUTPUT_ONLY}
    fields |= {"stream": False, "temperature": 0.0, **ONE_TOKEN[endpoint]}
    if endpoint == "/v1/messages" and _names_tool(fields.get("tool_choice")):
        # vLLM parses the arguments of a named tool as JSON (anthropic/serving.py), and one token is
        # not valid JSON. `any` gives the same prompt in all templates but Kimi K3's; there the
        # digests of the prompts differ, and decode computes the prompt.
        fields["tool_choice"] = {"type": "any"}
    fields[TRANSFER_FIELD] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}
    return fields


def _names_tool(choice: Any) -> bool:
    if isinstance(choice, msgspec.Raw):
        # `json` has parsed the body. `msgspec.Raw` also copies values that msgspec cannot decode,
        # such as invalid Unicode or 1e999.
        choice = json.loads(bytes(choice))
    return isinstance(choice, Mapping) and choice.get("type") == "tool"


def first_token_body(body: Body, transfer_id: str) -> dict[str, Any]:
    """Return the body for a prefill engine that samples the first token.

    It is the client's body and the transfer parameters. The engine itself limits the answer to one
    token (`actors/upstream/vllm_output_processor.py`).
    """
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id, "first_token": True}
    return {**body, TRANSFER_FIELD: params}


def decode_body(body: Body, transfer_id: str, producer: ProducerAddress, samples: bool = False) -> dict[str, Any]:
    """Return the body for the decode engine: the client's body and the transfer parameters.

    ``samples``  whether the prefill engine samples the first token
    """
    params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer_id, **asdict(producer)}
    multiple = params.pop("first_token_multiple")
    if samples:
        params["prompt_multiple"] = multiple
    return {**body, TRANSFER_FIELD: params}
