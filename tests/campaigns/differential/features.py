"""Features of the API: the fields for each at each endpoint, and the service's route."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
from tests.campaigns.differential.model import THOUGHT_ID
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


@dataclass(frozen=True)
class Feature:
    """The fields beyond a plain greedy request; an endpoint with None has no such feature."""

    name: str
    completions: Fields | None = None
    chat: Fields | None = None
    responses: Fields | None = None
    route: Routed | None = "remote"
    facts: int = 14
    streams: bool = True
    alone: bool = False


def everywhere(name: str, fields: Fields, **more: Any) -> Feature:
    """A feature with one name at all three endpoints."""
    return Feature(name, fields, fields, fields, **more)


def generating(name: str, fields: Fields, **more: Any) -> Feature:
    """A feature with one name for completions and chats."""
    return Feature(name, fields, fields, None, **more)


def sampled(seed: int, **more: Any) -> Fields:
    return {"temperature": 1.0, "seed": seed, "ignore_eos": True, **more}


LONGER = {
    "completions": {"max_tokens": 40},
    "chat": {"max_completion_tokens": 40},
    "responses": {"max_output_tokens": 40},
}


def longer(name: str, fields: Fields, **more: Any) -> Feature:
    """A feature that shows only in an answer of forty tokens."""
    return Feature(name, fields | LONGER["completions"], fields | LONGER["chat"], fields | LONGER["responses"], **more)


LOGPROBS_INCLUDED = ["message.output_text.logprobs"]

FEATURES: tuple[Feature, ...] = (
    everywhere("plain", {}),
    generating("no token ids", {"return_token_ids": ABSENT}),
    everywhere("one block", {}, facts=5),
    everywhere("several chunks", {}, facts=60),
    everywhere("many chunks", {}, facts=200),
    Feature("default length", {"max_tokens": ABSENT}, {"max_completion_tokens": ABSENT}, {"max_output_tokens": ABSENT}),
    Feature("one token", {"max_tokens": 1}, {"max_completion_tokens": 1}, {"max_output_tokens": 1}),
    Feature("no token", {"max_tokens": 0}, {"max_completion_tokens": 0}, None, route=None),
    Feature("max_tokens", chat={"max_completion_tokens": ABSENT, "max_tokens": 3}),
    Feature("both lengths", chat={"max_completion_tokens": 5, "max_tokens": 3}),
    longer("ignore_eos", {"ignore_eos": True}),
    longer("seed", sampled(7)),
    longer("hot", sampled(11, temperature=2.0)),
    longer("top_p", sampled(3, top_p=0.8)),
    longer("top_k", sampled(4, top_k=5)),
    longer("top_k 1", {"temperature": 1.5, "top_k": 1, "ignore_eos": True}),
    longer("min_p", sampled(5, min_p=0.05)),
    longer("presence_penalty", sampled(6, presence_penalty=1.2)),
    longer("frequency_penalty", sampled(8, frequency_penalty=0.9)),
    longer("repetition_penalty", sampled(9, repetition_penalty=1.3)),
    longer("greedy penalties", {"ignore_eos": True, "presence_penalty": 0.5, "frequency_penalty": 0.5}),
    everywhere("logit_bias", {"logit_bias": {"270": 100, "12": -100}}),
    generating("allowed_token_ids", {"allowed_token_ids": [300, 301, 302], "ignore_eos": True}),
    generating("bad_words", {"bad_words": ["1", "4", "7", "mira"]}),
    Feature("n", {"n": 3, **sampled(12)}, {"n": 3, **sampled(12)}, None),
    Feature("n, greedy", {"n": 2}, {"n": 2}, None),
    Feature("n 1", {"n": 1}, {"n": 1}),
    Feature("best_of", {"best_of": 3, **sampled(13)}, None, None, route="local"),
    Feature("best_of 1", {"best_of": 1}),
    Feature("logprobs", {"logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
    Feature("logprobs 0", {"logprobs": 0}, {"logprobs": True, "top_logprobs": 0}),
    Feature("logprobs, sampled", sampled(14, logprobs=5), sampled(14, logprobs=True, top_logprobs=5)),
    Feature("logprobs of text", responses={"include": LOGPROBS_INCLUDED, "top_logprobs": 2}),
    Feature(
        "logprob_token_ids",
        {"logprobs": 1, "logprob_token_ids": [270, 271]},
        {"logprobs": True, "logprob_token_ids": [270]},
        alone=True,
    ),
    generating("tokens as ids", {"return_tokens_as_token_ids": True, "logprobs": 2}),
    Feature("tokens as ids in a chat", chat={"return_tokens_as_token_ids": True, "logprobs": True, "top_logprobs": 2}),
    generating("prompt_logprobs", {"prompt_logprobs": 2}, route="local", streams=False),
    generating("prompt_logprobs 0", {"prompt_logprobs": 0}, route="local"),
    Feature("echo", {"echo": True}, {"echo": True}, route="local"),
    Feature("echo, logprobs", {"echo": True, "logprobs": 2}, route="local"),
    Feature("echo, no token", {"echo": True, "max_tokens": 0, "logprobs": 1}, route="local"),
    Feature("echo, prompt_logprobs", {"echo": True, "prompt_logprobs": 1}, route="local", streams=False),
    longer("stop", sampled(15, stop=["9", "mi"])),
    longer("stop, one", sampled(16, stop="1")),
    longer("stop, kept", sampled(17, stop=["5"], include_stop_str_in_output=True)),
    longer("stop_token_ids", sampled(18, stop_token_ids=[270, 271, 272, 273])),
    everywhere("stop, not met", {"stop": ["never"]}),
    generating("min_tokens", {"min_tokens": 6}),
    generating("min_tokens, stop", sampled(19, min_tokens=5, stop=["1", "2", "3", "4", "5"])),
    generating("special tokens shown", {"skip_special_tokens": False}),
    generating("truncate_prompt_tokens", {"truncate_prompt_tokens": 40}),
    generating("truncated left", {"truncate_prompt_tokens": 40, "truncation_side": "left"}),
    generating("no special tokens added", {"add_special_tokens": False}),
    everywhere("priority", {"priority": 5}),
    everywhere("priority, first", {"priority": -3}),
    everywhere("cache_salt", {"cache_salt": "mine alone"}),
    everywhere("user", {"user": "somebody"}),
    # vLLM 0.32 on CPUs adds an adapter to whatever shares a batch with it, and pads the others'
    # logprobs.
    everywhere("adapter", {"model": ADAPTER}, alone=True),
    everywhere("no model named", {"model": ABSENT}),
    everywhere("a field that nobody knows", {"no_such_field": 3}),
    everywhere("session", {"session_id": "s1"}),
    longer(
        "repetition_detection",
        sampled(
            20,
            logit_bias={"300": 60},
            repetition_detection={"max_pattern_size": 3, "min_pattern_size": 1, "min_count": 4},
        ),
    ),
    generating("stream_interval", {"stream_interval": 4, "ignore_eos": True}),
    generating("thinking budget", {"thinking_token_budget": 3}),
    Feature(
        "beam search",
        {"use_beam_search": True, "n": 2},
        {"use_beam_search": True, "n": 2},
        route="local",
        streams=False,
    ),
    Feature("suffix", {"suffix": "end"}, route=None),
    # Structured output.
    longer("regex", {"structured_outputs": {"regex": "[a-f]{6}-[0-9]{4}"}}),
    longer("choice", {"structured_outputs": {"choice": ["mira", "kelo", "tiba"]}}),
    longer("schema", {"structured_outputs": {"json": SCHEMA}}),
    longer("grammar", {"structured_outputs": {"grammar": GRAMMAR}}),
    longer("any object", {"structured_outputs": {"json_object": True}}),
    Feature(
        "response_format",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}, "max_tokens": 40},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}, "max_tokens": 40},
        {"text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}}, "max_output_tokens": 40},
    ),
    Feature(
        "json_object",
        {"response_format": {"type": "json_object"}, "max_tokens": 30},
        {"response_format": {"type": "json_object"}, "max_completion_tokens": 30},
        {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 30},
    ),
    Feature(
        "text format",
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "text"}},
        {"text": {"format": {"type": "text"}}},
    ),
    Feature("schema, sampled", sampled(21, structured_outputs={"json": SCHEMA}, max_tokens=40, ignore_eos=ABSENT)),
    # Tools.
    Feature("tools offered", None, {"tools": [TOOL]}, {"tools": [FLAT_TOOL]}),
    Feature(
        "tools, auto",
        None,
        {"tools": [TOOL, OTHER_TOOL], "tool_choice": "auto"},
        {"tools": [FLAT_TOOL], "tool_choice": "auto"},
    ),
    Feature(
        "tools, none", None, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [FLAT_TOOL], "tool_choice": "none"}
    ),
    Feature(
        "tools, required",
        None,
        {"tools": [TOOL, OTHER_TOOL], "tool_choice": "required", "max_completion_tokens": 80},
        {"tools": [FLAT_TOOL], "tool_choice": "required", "max_output_tokens": 80},
    ),
    Feature("tools, required, cut off", None, {"tools": [TOOL], "tool_choice": "required"}),
    Feature(
        "tools, named",
        None,
        {
            "tools": [TOOL, OTHER_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_completion_tokens": 60,
        },
        {"tools": [FLAT_TOOL], "tool_choice": {"type": "function", "name": "weather"}, "max_output_tokens": 60},
    ),
    Feature(
        "tools, called",
        None,
        {"tools": [TOOL], "tool_choice": "auto", "structured_outputs": {"regex": CALL}, "max_completion_tokens": 120},
    ),
    Feature(
        "tools, one call",
        None,
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_completion_tokens": 80},
    ),
    Feature(
        "tools, logprobs",
        None,
        {"tools": [TOOL], "tool_choice": "required", "logprobs": True, "top_logprobs": 1, "max_completion_tokens": 60},
    ),
    # Reasoning: the bias makes the model end its thoughts at some time.
    Feature(
        "reasoning",
        None,
        sampled(22, chat_template_kwargs={"thinking": True}, logit_bias={str(THOUGHT_ID): 9}, max_completion_tokens=30),
        sampled(22, chat_template_kwargs={"thinking": True}, logit_bias={str(THOUGHT_ID): 9}, max_output_tokens=30),
    ),
    Feature(
        "reasoning, no end",
        None,
        {"chat_template_kwargs": {"thinking": True}},
        {"chat_template_kwargs": {"thinking": True}},
    ),
    Feature(
        "reasoning left out",
        None,
        sampled(
            23,
            chat_template_kwargs={"thinking": True},
            include_reasoning=False,
            logit_bias={str(THOUGHT_ID): 9},
            max_completion_tokens=30,
        ),
        sampled(
            23,
            chat_template_kwargs={"thinking": True},
            include_reasoning=False,
            logit_bias={str(THOUGHT_ID): 9},
            max_output_tokens=30,
        ),
    ),
    Feature("reasoning_effort", None, {"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}),
    Feature(
        "reasoning, then a schema",
        None,
        sampled(
            24,
            chat_template_kwargs={"thinking": True},
            logit_bias={str(THOUGHT_ID): 9},
            structured_outputs={"json": SCHEMA},
            max_completion_tokens=60,
            ignore_eos=ABSENT,
        ),
    ),
    # Fields that change the rendered prompt or the answer's metadata.
    Feature("prompt text", None, {"return_prompt_text": True}),
    Feature("no generation prompt", None, {"add_generation_prompt": False}),
    Feature("instructions", responses={"instructions": "be brief"}),
    Feature("metadata", responses={"metadata": {"a": "b"}, "parallel_tool_calls": False}),
    Feature("store", responses={"store": False}),
    Feature("truncation", responses={"truncation": "auto"}),
    Feature("messages shown", responses={"enable_response_messages": True}),
    Feature("prompt_cache_key", responses={"prompt_cache_key": "k"}),
)

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
    for feature in FEATURES:
        by_path = {COMPLETIONS: feature.completions, CHAT: feature.chat, RESPONSES: feature.responses}
        for path, fields in by_path.items():
            if fields is None:
                continue
            for stream in (False, True) if feature.streams else (False,):
                name = f"{path} {feature.name}{', streamed' if stream else ''}"
                body = BUILDERS[path](name, feature.facts, **fields) | _streaming(path, stream)
                yield Case(name, (request(path, body),), feature.route, alone=feature.alone)
                if path == COMPLETIONS:
                    name += ", from token ids"
                    body = body | {"prompt": token_ids(name, feature.facts)}
                    yield Case(name, (request(path, body),), feature.route, alone=feature.alone)


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
                yield Case(name, (request(COMPLETIONS, body),), route)
