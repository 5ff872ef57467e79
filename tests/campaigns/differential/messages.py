"""Requests of Anthropic's Messages API at `/v1/messages`: features, wrong values and invalid
bodies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.settings.service import DEMO_SERVED_NAME
from tests.campaigns.differential.cases import (
    ABSENT,
    JSON_TYPE,
    Case,
    Request,
    Routed,
    prompt,
    request,
    without_nothing,
)
from tests.campaigns.differential.features import SCHEMA
from tests.campaigns.differential.others import FRAMEWORK
from tests.campaigns.differential.pair import ADAPTER
from tests.campaigns.differential.wrong import OURS

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"

TOOL = {"name": "weather", "description": "of a city", "input_schema": SCHEMA}
NAMED = {"type": "tool", "name": "weather"}
LOOKED_UP = [
    {"role": "user", "content": [{"type": "text", "text": "how is it in"}, {"type": "text", "text": "Bern?"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
]

FEATURES: dict[str, tuple[dict[str, Any], Routed | None]] = {
    "plain": ({}, "remote"),
    "one token": ({"max_tokens": 1}, "remote"),
    "system": ({"system": "be brief"}, "remote"),
    "system in blocks": ({"system": [{"type": "text", "text": "be"}, {"type": "text", "text": " brief"}]}, "remote"),
    "a turn of the system": ({"messages": [*prompt("inline").messages, {"role": "system", "content": "x"}]}, "remote"),
    "a conversation with a tool": ({"messages": LOOKED_UP, "tools": [TOOL]}, "remote"),
    "top_k 1": ({"temperature": 1.5, "top_k": 1}, "remote"),
    "stop_sequences": ({"stop_sequences": ["0", "1", "2", "3", "4", "5"], "max_tokens": 30}, "remote"),
    "stop_sequences, not met": ({"stop_sequences": ["never"]}, "remote"),
    "cache_salt": ({"cache_salt": "mine alone"}, "remote"),
    "adapter": ({"model": ADAPTER}, "remote"),
    "schema": ({"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 40}, "remote"),
    "effort": ({"output_config": {"effort": "low"}}, "remote"),
    "thinking disabled": ({"thinking": {"type": "disabled"}}, "remote"),
    "thinking adaptive": ({"thinking": {"type": "adaptive"}}, "remote"),
    "thinking": (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1030},
        None,
    ),  # needs reasoning_config
    "thinking in the template": ({"chat_template_kwargs": {"thinking": True}}, "remote"),
    "tools": ({"tools": [TOOL]}, "remote"),
    "tools, auto": ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, "remote"),
    "tools, none": ({"tools": [TOOL], "tool_choice": {"type": "none"}}, "remote"),
    "tools, any": ({"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 80}, "remote"),
    "tools, named": ({"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 80}, "remote"),
    "tools, named, cut off": ({"tools": [TOOL], "tool_choice": NAMED}, None),
    "metadata": ({"metadata": {"user_id": "u"}}, "remote"),
    "n, which this API lacks": ({"n": 3}, "remote"),
}

ALONE = {"adapter", "a turn of the system", "a conversation with a tool"}
"""Features whose streamed and whole requests have the same prompt. Sent together, either of them
may find the other's blocks cached.
"""

WRONG: dict[str, list[Any]] = {
    "model": [ABSENT, "other", "", 5],
    "max_tokens": [ABSENT, 0, -1, "many", 100_000],
    "messages": [
        ABSENT,
        None,
        [],
        "hi",
        [{}],
        [{"role": "user"}],
        [{"role": "nobody", "content": "x"}],
        [{"role": "user", "content": [{"type": "nothing"}]}],
        [{"role": "user", "content": "!" * 3000}],
    ],
    "temperature": [-1, "hot"],
    "top_p": [0, 1.5],
    "top_k": [-2, "x"],
    "stop_sequences": ["x", [5], [""]],
    "stream": ["maybe"],
    "system": [5, [{"type": "nothing"}]],
    "tools": ["x", [{}], [{"name": "x"}]],
    "tool_choice": ["auto", {"type": "some"}, {"type": "tool"}, {"type": "tool", "name": "x"}],
    "thinking": ["x", {"type": "enabled"}, {"type": "enabled", "budget_tokens": 5000}],
    "output_config": ["x", {"effort": "huge"}, {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}],
    "cache_salt": ["", 5],
}

BODIES = {"no JSON": b"{", "a list": b"[]", "nothing": b"", "no UTF-8": b'{"a": "\xff"}'}


def message(name: str, facts: int = 14, **more: Any) -> dict[str, Any]:
    body = {"model": DEMO_SERVED_NAME, "messages": prompt(name, facts).messages, "max_tokens": 8, "temperature": 0}
    return without_nothing({**body, **more})


def message_cases() -> Iterator[Case]:
    """Features whole and streamed, repeated prompts, wrong values, tokens, bodies that are no
    request.
    """
    for feature, (fields, route) in FEATURES.items():
        for stream in (False, True):
            name = f"{MESSAGES} {feature}{', streamed' if stream else ''}"
            body = message(name, **fields) | ({"stream": True} if stream else {})
            yield Case(name, (request(MESSAGES, body),), route, alone=feature in ALONE)
    for facts in (5, 14, 60, 200):
        for stream in (False, True):
            name = f"{MESSAGES} again, {facts} facts{', streamed' if stream else ''}"
            again = request(MESSAGES, message(name, facts, stream=stream))
            yield Case(name, (again, again), "remote")
        name = f"{COUNT_TOKENS} {facts} facts"
        yield Case(name, (request(COUNT_TOKENS, message(name, facts, max_tokens=ABSENT)),), "local")
    name = f"{COUNT_TOKENS} of a system and tools"
    yield Case(name, (request(COUNT_TOKENS, message(name, system="be brief", tools=[TOOL])),), "local")
    for path in (MESSAGES, COUNT_TOKENS):
        for field, values in WRONG.items():
            if path == COUNT_TOKENS and field not in ("model", "messages", "system", "tools"):
                continue
            for value in values:
                shown = "left out" if value is ABSENT else repr(value)[:60]
                name = f"{path} wrong {field}: {shown}"
                yield Case(name, (request(path, message(name, **{field: value})),))
        for kind, content in BODIES.items():
            framework = FRAMEWORK if kind == "no UTF-8" else ""
            yield Case(f"{path} {kind}", (Request(path, content),), message_differs=OURS, only_status=framework)
        headers = JSON_TYPE | {"content-type": "text/plain"}
        yield Case(f"{path} sent as text/plain", (request(path, message(f"{path} plain"), headers),))
        yield Case(f"GET {path}", (Request(path, method="GET"),), only_status=FRAMEWORK)
