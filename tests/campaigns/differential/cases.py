"""What is asked of both sides: requests, with prompts that nobody has asked before."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from app.demo.facts import RecallPrompt, make_prompt
from configs.settings import DEMO_MODEL_DIR, DEMO_SERVED_NAME

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOKENIZE, DETOKENIZE, MODELS = "/tokenize", "/detokenize", "/v1/models"
JSON_TYPE = {"content-type": "application/json"}

Routed = Literal["remote", "local"]


@dataclass(frozen=True)
class Request:
    """One HTTP request."""

    path: str
    content: bytes = b""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=lambda: JSON_TYPE)


@dataclass(frozen=True)
class Case:
    """Requests that are sent one after the other to either side; every answer is compared.

    `route` is how the service is to serve the last one (None: a refusal, or not a matter of two engines). With
    `exact_ids` the client has named the request; `message_differs` says why the words of a refusal are not compared.
    `only_status` says why nothing but the status is. `unanswered` says why the single server may give no answer at all:
    then the service's need only be one, and no 500. `alone` keeps other requests out of the engines' batches.
    """

    name: str
    requests: tuple[Request, ...]
    route: Routed | None = None
    exact_ids: bool = False
    message_differs: str = ""
    only_status: str = ""
    unanswered: str = ""
    alone: bool = False


def request(path: str, body: Any, headers: Mapping[str, str] = JSON_TYPE) -> Request:
    return Request(path, json.dumps(body).encode(), headers=headers)


def prompt(name: str, facts: int = 14) -> RecallPrompt:
    """A prompt of this case alone: neither side has a block of it cached. 14 facts are 87 tokens, two whole blocks."""
    return make_prompt(random.Random(f"differential {name}"), facts)


def token_ids(name: str, facts: int = 14) -> list[int]:
    """The same as token ids."""
    return encode(prompt(name, facts).text)


def encode(text: str) -> list[int]:
    return list(_tokenizer().encode(text))


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)


def completion(name: str, facts: int = 14, **more: Any) -> dict[str, Any]:
    body = {"model": DEMO_SERVED_NAME, "prompt": prompt(name, facts).text, "max_tokens": 8, "temperature": 0}
    return without_nothing({**body, "return_token_ids": True, **more})


def chat(name: str, facts: int = 14, **more: Any) -> dict[str, Any]:
    body = {"model": DEMO_SERVED_NAME, "messages": prompt(name, facts).messages, "max_completion_tokens": 8}
    return without_nothing({**body, "temperature": 0, "return_token_ids": True, **more})


def responses(name: str, facts: int = 14, **more: Any) -> dict[str, Any]:
    body = {"model": DEMO_SERVED_NAME, "input": prompt(name, facts).text, "max_output_tokens": 8, "temperature": 0}
    return without_nothing({**body, **more})


ABSENT = object()
"""A field's value that leaves the field out."""


def without_nothing(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not ABSENT}
