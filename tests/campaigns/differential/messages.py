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
    prompt,
    request,
    without_nothing,
)
from tests.campaigns.differential.features import VALUES, table
from tests.campaigns.differential.others import FRAMEWORK
from tests.campaigns.differential.wrong import OURS

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"

LOOKED_UP = [
    {"role": "user", "content": [{"type": "text", "text": "how is it in"}, {"type": "text", "text": "Bern?"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bern"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]},
]

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "a turn of the system": {"messages": [*prompt("inline").messages, {"role": "system", "content": "x"}]},
    "a conversation with a tool": {"messages": LOOKED_UP, "tools": [VALUES["$MTOOL"]]},
}
ALONE = {"adapter", *CONVERSATIONS}
"""Features whose streamed and whole requests have the same prompt. Sent together, either of them
may find the other's blocks cached.
"""

BODIES = {"no JSON": b"{", "a list": b"[]", "nothing": b"", "no UTF-8": b'{"a": "\xff"}'}


def message(name: str, facts: int = 14, **more: Any) -> dict[str, Any]:
    body = {"model": DEMO_SERVED_NAME, "messages": prompt(name, facts).messages, "max_tokens": 8, "temperature": 0}
    return without_nothing({**body, **more})


def message_cases() -> Iterator[Case]:
    """Features whole and streamed, repeated prompts, wrong values, tokens, bodies that are no
    request.
    """
    features = {name: (fields, "remote") for name, fields in CONVERSATIONS.items()}
    for feature, (fields, route) in (table("messages.yaml") | features).items():
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
    yield Case(name, (request(COUNT_TOKENS, message(name, system="be brief", tools=[VALUES["$MTOOL"]])),), "local")
    for path in (MESSAGES, COUNT_TOKENS):
        for field, values in table("wrong.yaml")[MESSAGES].items():
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
