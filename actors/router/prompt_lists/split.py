"""Split a completion request with a list of prompts into one request per prompt."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from actors.raw_json import as_written, write
from actors.router.client_request import ClientRequest
from actors.router.request_shaping import why_local

REQUEST_ID = b"x-request-id"


def split(request: ClientRequest, most_bytes: float = math.inf) -> list[ClientRequest]:
    """Return one request per prompt, or [] if the request is not split.

    The id of each request is the id of the list's request plus the prompt's index: with one id, an
    engine would abort all prompts together. Each request has a copy of the other fields. A list
    whose copies have more than `most_bytes` is not split.
    """
    prompts: Any = request.body.get("prompt")
    if request.endpoint != "/v1/completions" or not _is_list_of_prompts(prompts):
        return []
    if why_local(request.endpoint, {**request.body, "prompt": "any"}) is not None:
        return []
    if not isinstance(request.body.get("stream"), bool | None):
        return []  # vLLM converts such a `stream`
    fields = as_written(request.raw)
    written = fields["prompt"]
    each: list[Any] = (
        msgspec.json.decode(written, type=list[msgspec.Raw]) if isinstance(written, msgspec.Raw) else prompts
    )
    prompt_bytes = memoryview(written).nbytes if isinstance(written, msgspec.Raw) else len(write({"": prompts}))
    if (len(request.raw) - prompt_bytes) * len(prompts) > most_bytes:
        return []
    return [
        replace(
            request,
            headers=(
                *((name, value) for name, value in request.headers if name != REQUEST_ID),
                (REQUEST_ID, f"{parent_id(request)}-{index}".encode()),
            ),
            raw=write({**fields, "prompt": _list_of(each[index])}),
            body={**request.body, "prompt": [prompt]},
            part=index > 0,
        )
        for index, prompt in enumerate(prompts)
    ]


def begun(request: ClientRequest) -> ClientRequest:
    """Return a streaming `request` with its arrival set to now, and other requests unchanged.

    So the timeout of the first token begins when the router starts with the prompt, not when its
    list arrived.
    """
    return request.with_metadata(arrived_at=time.monotonic()) if request.streams else request


def parent_id(request: ClientRequest) -> str:
    """Return the id that vLLM would use for the answer: the header's, else the body's, else ""."""
    named = request.body.get("request_id")
    return request.request_id or (named if isinstance(named, str) else "")


def _list_of(prompt: Any) -> Any:
    """Return a list with `prompt` only; it is encoded if `prompt` is encoded."""
    return msgspec.Raw(b"[" + bytes(prompt) + b"]") if isinstance(prompt, msgspec.Raw) else [prompt]


def _is_list_of_prompts(prompts: Any) -> bool:
    if not isinstance(prompts, list) or len(prompts) < 2:
        return False
    return all(isinstance(one, str) for one in prompts) or all(_is_token_ids(one) for one in prompts)


def _is_token_ids(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and all(type(token) is int for token in prompt)
