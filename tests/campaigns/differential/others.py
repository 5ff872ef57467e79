"""Cases that are no cell of the table: repeated prompts, tokens, other routes, named requests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.settings.service import DEMO_SERVED_NAME
from tests.campaigns.differential.cases import (
    ABSENT,
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    JSON_TYPE,
    MODELS,
    RESPONSES,
    TOKENIZE,
    Case,
    Request,
    chat,
    completion,
    prompt,
    request,
    responses,
    token_ids,
    without_nothing,
)
from tests.campaigns.differential.features import BUILDERS, TOOL
from tests.campaigns.differential.pair import ADAPTER

BATCH = "/v1/chat/completions/batch"
BATCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "a model that nobody has": {"model": "other"},
    "no chats": {"messages": []},
    "an empty chat": {"messages": [[]]},
    "n": {"n": 2},
    "left out": {"messages": ABSENT},
}
OF_OTHER_MODELS = (
    "/v1/embeddings",
    "/v2/embed",
    "/pooling",
    "/classify",
    "/score",
    "/v1/score",
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
)
"""Endpoints that vLLM registers for the tasks of other models."""

FRAMEWORK = "vLLM leaves it to its web framework, which answers in a form of its own; the service's is OpenAI's"


def cache_cases() -> Iterator[Case]:
    """Yield repeated, continued and salted prompts, to compare `cached_tokens`."""
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    for path, build in BUILDERS.items():
        for facts in (5, 14, 60):
            for stream in (False, True):
                name = f"{path} again, {facts} facts{', streamed' if stream else ''}"
                more = ({"stream": True} if path == RESPONSES else usage) if stream else {}
                again = request(path, build(name, facts, **more))
                yield Case(name, (again, again, again), "remote")
    for stream in (False, True):
        name = f"{CHAT} turns{', streamed' if stream else ''}"
        turns: list[dict[str, str]] = []
        sent = []
        for turn in range(4):
            turns = [*turns, *prompt(f"{name} {turn}", 20).messages]
            sent.append(request(CHAT, chat(name, messages=turns, **(usage if stream else {}))))
            turns = [*turns, {"role": "assistant", "content": "mira=427"}]
        yield Case(name, tuple(sent), "remote")
    name = f"{COMPLETIONS} longer and longer"
    yield Case(name, tuple(request(COMPLETIONS, completion(name, facts)) for facts in (10, 40, 90)), "remote")
    name = f"{COMPLETIONS} salted"
    salts: tuple[dict[str, Any], ...] = ({"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {})
    yield Case(name, tuple(request(COMPLETIONS, completion(name, **salt)) for salt in salts), "remote")
    name = f"{COMPLETIONS} with and without the adapter"
    models: tuple[dict[str, Any], ...] = ({}, {"model": ADAPTER}, {"model": ADAPTER}, {})
    yield Case(name, tuple(request(COMPLETIONS, completion(name, **model)) for model in models), "remote", alone=True)
    name = f"{COMPLETIONS} alone, then apart"
    alone: dict[str, Any] = {"best_of": 2, "temperature": 1.0, "seed": 5}
    both: tuple[dict[str, Any], ...] = (alone, {}, {"echo": True}, alone)
    yield Case(name, tuple(request(COMPLETIONS, completion(name, **more)) for more in both), "local")
    name = f"{COMPLETIONS} several choices, then the same again"
    several: dict[str, Any] = {"n": 4, "temperature": 1.0, "seed": 5}
    yield Case(name, tuple(request(COMPLETIONS, completion(name, **more)) for more in (several, {}, several)), "remote")


def token_cases() -> Iterator[Case]:
    """Yield requests to the endpoints for tokens."""
    text = prompt("tokens").text
    bodies: dict[str, dict[str, Any]] = {
        "text": {"prompt": text},
        "nothing": {"prompt": ""},
        "letters of many bytes": {"prompt": "\u00e9\u4f60\U0001f600"},
        "no special tokens": {"prompt": text, "add_special_tokens": False},
        "strings": {"prompt": text, "return_token_strs": True},
        "a chat": {"messages": prompt("tokens").messages},
        "a chat's strings": {"messages": prompt("tokens").messages, "return_token_strs": True},
        "a chat without the generation prompt": {"messages": prompt("tokens").messages, "add_generation_prompt": False},
        "a chat with tools": {"messages": prompt("tokens").messages, "tools": [TOOL]},
        "the adapter": {"prompt": text, "model": ADAPTER},
        "longer than fits": {"prompt": "!" * 5000},
        "another model": {"prompt": text, "model": "other"},
        "neither": {},
        "a wrong type": {"prompt": 3},
        "no messages": {"messages": []},
    }
    for name, body in bodies.items():
        yield Case(f"{TOKENIZE} {name}", (request(TOKENIZE, {"model": DEMO_SERVED_NAME, **body}),))
    ids: dict[str, Any] = {
        "ids": token_ids("tokens"),
        "none": [],
        "beyond the vocabulary": [10**6],
        "a negative one": [-1],
        "no list": "abc",
        "texts": ["a"],
    }
    for name, tokens in ids.items():
        yield Case(f"{DETOKENIZE} {name}", (request(DETOKENIZE, {"model": DEMO_SERVED_NAME, "tokens": tokens}),))


def named_cases() -> Iterator[Case]:
    """Yield requests with a client's id, which their answers repeat, and with headers for vLLM."""
    for path, build in BUILDERS.items():
        for stream in (False, True):
            name = f"{path} named in the header{', streamed' if stream else ''}"
            body = build(name, stream=stream)
            headers = JSON_TYPE | {"x-request-id": "trace-1"}
            yield Case(name, (request(path, body, headers),), "remote")
            name = f"{path} named in the body{', streamed' if stream else ''}"
            yield Case(name, (request(path, build(name, stream=stream, request_id="body-1")),), "remote")
    for header, value in {
        "x-vllm-priority": "7",
        "x-session-id": "s",
        "accept": "text/event-stream",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "endpoint-load-metrics-format": "TEXT",
    }.items():
        name = f"{COMPLETIONS} with the header {header}"
        yield Case(name, (request(COMPLETIONS, completion(name), JSON_TYPE | {header: value}),), "remote")


def route_cases() -> Iterator[Case]:
    """Yield requests to other routes, existing or not."""
    yield Case("models", (Request(MODELS, method="GET"),))
    yield Case("version", (Request("/version", method="GET"),))
    for method in ("GET", "PUT", "DELETE"):
        yield Case(f"{method} {COMPLETIONS}", (Request(COMPLETIONS, method=method),), only_status=FRAMEWORK)
    for path in ("/v1/nothing", "/v1/completions/"):  # "/": no such path in vLLM
        yield Case(f"POST {path}", (request(path, {}),), only_status=FRAMEWORK)
    yield Case("tokenizer_info", (Request("/tokenizer_info", method="GET"),))
    for path in OF_OTHER_MODELS:
        yield Case(f"{path}, of which this model has none", (request(path, {"model": DEMO_SERVED_NAME, "input": "a"}),))
    for name, more in BATCHES.items():
        chats = [prompt(f"batch {name} {index}", 3 + 9 * index).messages for index in range(3)]
        body = {"model": DEMO_SERVED_NAME, "messages": chats, "max_completion_tokens": 8, "temperature": 0, **more}
        yield Case(f"{BATCH} {name}", (request(BATCH, without_nothing(body)),))
    for path in ("/v1/responses/resp_0", "/v1/responses/none"):
        yield Case(f"GET {path}", (Request(path, method="GET"),))
    yield Case("cancel a response", (request("/v1/responses/resp_0/cancel", {}),))
    yield Case("a response that follows", (request(RESPONSES, responses("follows", previous_response_id="resp_0")),))
    yield Case("a response in the background", (request(RESPONSES, responses("background", background=True)),))
