"""Features of the API (`features.yaml`): the fields at each endpoint, and the service's route."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.campaigns.differential.cases import (
    ABSENT,
    CHAT,
    COMPLETIONS,
    RESPONSES,
    Case,
    Routed,
    chat,
    completion,
    encode,
    prompt,
    request,
    responses,
    token_ids,
)
from tests.campaigns.differential.pair import ADAPTER

Fields = dict[str, Any]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= "yes" | "no " [0-9] [0-9]'
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
OTHER_TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL = {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": False}
CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"city": "[a-z]{3}", "days": [1-9]\}\}\n</tool_call>'
"""A tool call in hermes format: a grammar makes the demo model write one."""


VALUES: dict[str, Any] = {
    "$ABSENT": ABSENT,
    "$ADAPTER": ADAPTER,
    "$CALL": CALL,
    "$FLAT_TOOL": FLAT_TOOL,
    "$GRAMMAR": GRAMMAR,
    "$LONG": "!" * 3000,
    "$MTOOL": {"name": "weather", "description": "of a city", "input_schema": SCHEMA},
    "$NAMED": {"type": "tool", "name": "weather"},
    "$OTHER_TOOL": OTHER_TOOL,
    "$SCHEMA": SCHEMA,
    "$TOOL": TOOL,
}
LONGER: dict[str, Fields] = {
    "completions": {"max_tokens": 40},
    "chat": {"max_completion_tokens": 40},
    "responses": {"max_output_tokens": 40},
}
"""A feature `longer` shows only in an answer of forty tokens."""


def table(name: str) -> Any:
    """Return the content of a YAML file of this folder, with VALUES for their names."""
    return _filled(yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8")))


def _filled(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _filled(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_filled(value) for value in tree]
    return VALUES.get(tree, tree) if isinstance(tree, str) else tree


def fields_of(feature: Fields) -> Iterator[tuple[str, Fields]]:
    """Yield the endpoints that have a feature, with its fields there."""
    for path, name in ((COMPLETIONS, "completions"), (CHAT, "chat"), (RESPONSES, "responses")):
        if "longer" in feature:
            yield path, feature["longer"] | LONGER[name]
        elif "all" in feature or ("both" in feature and path != RESPONSES):
            yield path, feature["all"] if "all" in feature else feature["both"]
        elif name in feature:
            yield path, feature[name]


STREAM_OPTIONS: tuple[tuple[str, Fields], ...] = (
    ("usage", {"include_usage": True}),
    ("usage in all", {"include_usage": True, "continuous_usage_stats": True}),
    ("no usage", {"include_usage": False}),
    ("no options", {}),
)

BUILDERS: dict[str, Callable[..., Fields]] = {COMPLETIONS: completion, CHAT: chat, RESPONSES: responses}


def feature_cases() -> Iterator[Case]:
    """Every feature at every endpoint that has it, whole and streamed; completions from text and
    from token ids.
    """
    for feature in table("features.yaml"):
        facts, route, alone = feature.get("facts", 14), feature.get("route", "remote"), feature.get("alone", False)
        for path, fields in fields_of(feature):
            for stream in (False, True) if feature.get("streams", True) else (False,):
                name = f"{path} {feature['name']}{', streamed' if stream else ''}"
                body = BUILDERS[path](name, facts, **fields) | _streaming(path, stream)
                yield Case(name, (request(path, body),), route, alone=alone)
                if path == COMPLETIONS:
                    name += ", from token ids"
                    body = body | {"prompt": token_ids(name, facts)}
                    yield Case(name, (request(path, body),), route, alone=alone)


def _streaming(path: str, stream: bool) -> Fields:
    if not stream:
        return {}
    return {"stream": True} if path == RESPONSES else {"stream": True, "stream_options": {"include_usage": True}}


def stream_option_cases() -> Iterator[Case]:
    for path in (COMPLETIONS, CHAT):
        for name, options in STREAM_OPTIONS:
            title = f"{path} stream_options: {name}"
            body = BUILDERS[path](title, stream=True, stream_options=options, ignore_eos=True)
            yield Case(title, (request(path, body),), "remote")
        title = f"{path} stream without options"
        yield Case(title, (request(path, BUILDERS[path](title, stream=True)),), "remote")


def prompt_cases() -> Iterator[Case]:
    """Prompts of every form."""
    forms: list[tuple[str, Callable[[str], Any], Routed | None]] = [
        ("a list of one text", lambda name: [prompt(name).text], "remote"),
        ("a list of one list of ids", lambda name: [token_ids(name)], "remote"),
        ("several texts", lambda name: [prompt(f"{name} {i}", 3 + 9 * i).text for i in range(4)], "remote"),
        ("several lists of ids", lambda name: [token_ids(f"{name} {i}", 3 + 9 * i) for i in range(3)], "remote"),
        ("one id", lambda name: [270], "local"),
        ("two ids", lambda name: [2, 270], "remote"),
        ("one letter", lambda name: "a", "remote"),
        ("letters of many bytes", lambda name: f"\u00e9\u4f60\U0001f600 {prompt(name).text}", "remote"),
        ("nearly all that fits", lambda name: (encode(prompt(name, 250).text) + [10] * 2048)[:2039], "remote"),
        ("all that fits", lambda name: (encode(prompt(name, 250).text) + [11] * 2048)[:2047], None),
        ("more than fits", lambda name: (encode(prompt(name, 250).text) + [12] * 2048)[:2048], None),
    ]
    for form, make, route in forms:
        for more in ({}, {"logprobs": 1}, {"n": 2, "temperature": 1.0, "seed": 3}):
            for stream in (False, True):
                name = f"{COMPLETIONS} {form} {sorted(more)}{', streamed' if stream else ''}"
                body = completion(name, prompt=make(name), **more) | _streaming(COMPLETIONS, stream)
                # A streamed list of several prompts goes to decode alone (decision 45).
                alone = stream and form.startswith("several")
                yield Case(name, (request(COMPLETIONS, body),), "local" if alone else route)
