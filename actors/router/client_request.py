"""A validated client request, its deadline, and which engines may serve it."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from actors.large_json import OFF_LOOP_BYTES
from actors.policy.prompts import Prompt, read_prompt
from actors.request import Body, Endpoint, Headers


@dataclass(frozen=True)
class ClientRequest:
    """A validated request.

    ``raw``         body as received; for a prompt of a list, the body that `split` wrote
    ``body``        parsed body; of a form, only the fields that the router needs
    ``session``     session id or None; requests of one session prefer the same decode replica
    ``explain``     whether the client asked for the routing decision and the latency breakdown
    ``part``        whether it is a later prompt of a list, not counted as a waiting request
    ``crowds``      whether its API key has more than its share of the router's ongoing requests
    ``sets_priority``  whether the client may set a priority (`router.client_priority`)
    ``arrived_at``  time at which the headers had arrived, on the monotonic clock; for a streamed
                    prompt of a list, time at which the router began to serve it
    ``read_at``     time at which the whole body had arrived, on the monotonic clock
    """

    endpoint: Endpoint
    headers: Headers
    raw: bytes
    body: Mapping[str, Any]
    session: str | None = None
    explain: bool = False
    part: bool = False
    crowds: bool = False
    sets_priority: bool = False
    arrived_at: float = field(default_factory=time.monotonic)
    read_at: float = field(default_factory=time.monotonic)

    @cached_property
    def prompt(self) -> Prompt:
        """Prompts of the request, in which the routing policy finds cached prefixes."""
        return read_prompt(self.body)

    async def prepare(self) -> None:
        """Compute `prompt` in a thread if the body is large."""
        if len(self.raw) > OFF_LOOP_BYTES:
            # Not through the property: before Python 3.12 a cached_property holds one lock for all
            # instances while it computes (https://github.com/python/cpython/issues/87634).
            vars(self).update(prompt=await asyncio.to_thread(read_prompt, self.body))

    def with_headers(self, headers: Headers) -> "ClientRequest":
        """Return a copy with other headers; keeps computed values."""
        copy = replace(self, headers=headers)
        vars(copy).update({**vars(self), "headers": headers})
        return copy

    @property
    def streams(self) -> bool:
        """True if `stream` is truthy; also for `"false"`, for which vLLM sends no stream."""
        return bool(self.body.get("stream"))

    @property
    def sequences(self) -> int:
        """Number of sequences of the request: prompts times `n`, or its number of `items`."""
        items = self.body.get("items")  # /generative_scoring: vLLM starts all items at once
        return max(self.prompt.answers, len(items) if isinstance(items, list) else 1)

    @property
    def priority(self) -> int:
        """Priority as vLLM reads it (`_get_priority` in vllm/entrypoints/generate/base/serving.py);
        0 if vLLM refuses it or the client may not set it.
        """
        if not self.sets_priority:
            return 0
        with suppress(KeyError, ValueError):
            return int(dict(self.headers)[b"x-vllm-priority"])
        given = self.body.get("priority")
        return given if type(given) is int else 0

    @property
    def request_id(self) -> str:
        """X-Request-Id for engines: the client's, else "" if the body has an id, else generated."""
        return dict(self.headers).get(b"x-request-id", b"").decode("latin-1")


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
    for name in ("use_beam_search", "echo", "prompt_embeds"):
        if body.get(name):
            return name
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


def prefill_may_sample(endpoint: Endpoint, body: Body) -> bool:
    """Return whether prefill may sample the first token of the answer.

    Decode then samples it again, and the router drops decode's events of it, as in a resumed
    stream. If decode samples a different token, the router tries to resume the stream with
    prefill's token. Anthropic's API has no `seed`, so the legs may sample different tokens.
    """
    streams = body.get("stream") is True  # vLLM converts other values
    return streams and endpoint != "/v1/messages" and why_not_resumable(endpoint, body) is None


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
    for name in ("background", "previous_response_id"):
        if body.get(name):
            return name  # stored responses are in one engine
    tools = body.get("tools")
    if isinstance(tools, list) and any(not isinstance(tool, dict) or tool.get("type") != "function" for tool in tools):
        return "tools_of_the_server"  # the engine calls the tools itself and continues with another prompt
    given = body.get("input")
    return None if isinstance(given, str) or (isinstance(given, list) and given) else "malformed"
