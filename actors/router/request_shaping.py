"""Decide from a client's request which engines may serve it. Pure."""

from collections.abc import Mapping
from typing import Any

from actors.request import Body, Endpoint

TOKENS_ONLY: frozenset[Endpoint] = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
"""Endpoints that only tokenize, detokenize or count tokens."""

SPLIT_ENDPOINTS: frozenset[Endpoint] = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
)
"""Endpoints whose requests a prefill and a decode engine can serve together."""


def why_local(endpoint: Endpoint, body: Body) -> str | None:
    """Return the reason for the local route, or None if a prefill engine can compute the prompt.

    A malformed body also takes the local route: vLLM's validation then produces the error.
    """
    if endpoint in TOKENS_ONLY:
        return "tokens_only"
    if endpoint not in SPLIT_ENDPOINTS:
        return "one_engine"
    if endpoint == "/v1/messages":
        return _why_local_message(body)
    if choices_of(body) is None:
        return "malformed"
    if body.get("best_of") not in (None, 1):
        return "best_of"
    for field in ("use_beam_search", "echo", "prompt_embeds"):
        if body.get(field):
            return field
    if body.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if endpoint == "/v1/completions":
        return _why_local_prompt(body.get("prompt"))
    if endpoint == "/v1/responses":
        return _why_local_response(body)
    return _why_local_turns(body)


def choices_of(body: Body) -> int | None:
    """Return the number of choices for each prompt; None if vLLM would refuse or convert `n`."""
    choices = body.get("n")
    if choices is None:
        return 1
    return choices if type(choices) is int and choices > 0 else None


def why_not_resumable(endpoint: Endpoint, body: Body) -> str | None:
    """Return the reason in the request why no other engine can continue its stream, or None."""
    if endpoint == "/v1/responses":
        return "engine-specific ids"  # each engine generates its own ids of output items
    if endpoint not in SPLIT_ENDPOINTS:
        return "several parts"  # an engine generates one part of a long recording after the other
    if body.get("n") not in (None, 1):
        return "n > 1"
    prompt = body.get("prompt")
    if (
        endpoint == "/v1/completions"
        and isinstance(prompt, list)
        and len(prompt) > 1
        and not isinstance(prompt[0], int)
    ):
        return "multiple prompts"
    return None


def why_decode_samples(endpoint: Endpoint, body: Body) -> str | None:
    """Return the reason in the request why decode must sample the first token, or None.

    If prefill samples it, decode samples the first token again, and the router drops decode's
    events of it, as in a resumed stream. If decode samples a different token, the router tries to
    resume the stream with prefill's token.
    """
    if body.get("stream") is not True:  # vLLM converts other values
        return "not streamed"
    if endpoint == "/v1/messages":
        return "no seed"  # Anthropic's API has no `seed`, so the legs may sample different tokens
    return why_not_resumable(endpoint, body)


def is_one_token(endpoint: Endpoint, body: Body) -> bool:
    """Return whether the answer is one choice of at most one token, which prefill can generate.

    False for `/v1/responses`, because only decode engines store responses.
    """
    most = body.get("max_tokens")
    if endpoint == "/v1/chat/completions" and body.get("max_completion_tokens") is not None:
        most = body["max_completion_tokens"]
    one = type(most) is int and most == 1 and choices_of(body) == 1
    return one and endpoint != "/v1/responses"


def needs_seed(body: Body) -> bool:
    """Return whether the legs need a seed from the router to sample the same first token.

    A request with a seed or with temperature 0 needs none. Without `temperature` the model's
    default applies, which may be above 0.
    """
    return body.get("seed") is None and body.get("temperature") != 0


def _why_local_prompt(prompt: Any) -> str | None:
    if isinstance(prompt, str):
        return None if prompt else "short_prompt"
    if not isinstance(prompt, list):
        return "malformed"
    if len(prompt) == 1 and isinstance(prompt[0], str | list):
        return _why_local_prompt(prompt[0])
    if any(not isinstance(token, int) for token in prompt):
        return "several_prompts"
    return None if len(prompt) >= 2 else "short_prompt"


def _why_local_turns(body: Body) -> str | None:
    messages = body.get("messages")
    return None if isinstance(messages, list) and messages else "malformed"


def _why_local_message(body: Body) -> str | None:
    """Return the reason for the local route of a request to Anthropic's API, or None.

    vLLM's error for a missing field contains the number of fields in the body. So decode must
    receive the client's body, without transfer parameters.
    """
    most = body.get("max_tokens")
    if not body.get("model") or type(most) is not int:
        return "malformed"
    thinking = body.get("thinking")
    budget = thinking.get("budget_tokens") if isinstance(thinking, Mapping) else None
    if type(budget) is int and budget >= most:
        return "malformed"
    return _why_local_turns(body)


def _why_local_response(body: Body) -> str | None:
    for field in ("background", "previous_response_id"):
        if body.get(field):
            return field  # stored responses are in one engine
    tools = body.get("tools")
    if isinstance(tools, list) and any(not isinstance(tool, dict) or tool.get("type") != "function" for tool in tools):
        return "tools_of_the_server"  # the engine calls the tools itself and continues with another prompt
    given = body.get("input")
    return None if isinstance(given, str) or (isinstance(given, list) and given) else "malformed"
