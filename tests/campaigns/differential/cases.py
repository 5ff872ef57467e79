"""Requests for both sides, with new prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from configs.settings.service import DEMO_MODEL_DIR, DEMO_SERVED_NAME
from testing.facts import RecallPrompt, make_prompt

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
    """Requests sent one after the other to either side; every answer is compared.

    `route` is the expected route of the last one (None: a refusal, or not a split endpoint).
    `exact_ids`: the client has named the request. `message_differs` is the reason why a refusal's
    message is not compared, `only_status` the reason why nothing but the status is. `unanswered` is
    the reason why the single server may give no answer: then the service must answer without a 500.
    `alone` keeps other requests out of the engines' batches. `features` are the rows of the report
    in which a random case counts.
    """

    name: str
    requests: tuple[Request, ...]
    route: Routed | None = None
    exact_ids: bool = False
    message_differs: str = ""
    only_status: str = ""
    unanswered: str = ""
    alone: bool = False
    features: tuple[str, ...] = ()


def request(path: str, body: Any, headers: Mapping[str, str] = JSON_TYPE) -> Request:
    return Request(path, json.dumps(body).encode(), headers=headers)


def prompt(name: str, facts: int = 14) -> RecallPrompt:
    """Return a prompt that no other case has, so neither side has cached it.

    14 facts are 87 tokens, two whole blocks.

    """
    return make_prompt(random.Random(f"differential {name}"), facts)


def token_ids(name: str, facts: int = 14) -> list[int]:
    """Return the same prompt as token ids."""
    return encode(prompt(name, facts).text)


def encode(text: str) -> list[int]:
    return list(_tokenizer().encode(text))


def decode(ids: list[int]) -> str:
    return str(_tokenizer().decode(ids))


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
"""Value of a field that removes the field."""


def without_nothing(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if value is not ABSENT}
