"""Kinds of streams that must survive the death of their decode engine.

Together they use all state that vLLM keeps per answer. Every stream is repeatable (greedy or
seeded), so an uninterrupted one is the reference.
"""

from __future__ import annotations

from typing import Any

from actors.request import Endpoint

MODEL = "tandem-demo"
PROMPT = "mira=427\nkelo=093\ntiba=618\nkelo?"
TOKENS = 40

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}

FRONTEND = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}
"""Arguments that the engine's OpenAI layer needs for these streams."""


def completion(**more: Any) -> tuple[Endpoint, dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "stream": True}
    return "/v1/completions", {**body, "stream_options": {"include_usage": True}, **more}


def chat(**more: Any) -> tuple[Endpoint, dict[str, Any]]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    return "/v1/chat/completions", {**body, "temperature": 1.0, "stream_options": options, **more}


KINDS: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "greedy": completion(temperature=0, ignore_eos=True),
    "penalties": completion(
        temperature=0.8,
        seed=7,
        ignore_eos=True,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        top_p=0.95,
        top_k=50,
    ),
    "any byte": completion(temperature=2.0, seed=11, ignore_eos=True, min_p=0.001),
    "logprobs": completion(temperature=0.9, seed=3, ignore_eos=True, logprobs=3),
    "stop strings": completion(temperature=1.6, seed=5, stop=["qq", "9=", "ba1"], min_tokens=30, ignore_eos=True),
    "min tokens": completion(temperature=0, min_tokens=20, stop=["\n"]),
    "regex": completion(temperature=0, structured_outputs={"regex": "([äöü€😀] ?){14}"}),
    "split characters": completion(temperature=1.0, seed=5, structured_outputs={"regex": "([äöü€😀] ?){14}"}),
    "echo": completion(temperature=0, echo=True, logprobs=2, ignore_eos=True),
    "token ids": completion(temperature=0.9, seed=8, return_token_ids=True, ignore_eos=True),
    "chat": chat(seed=2, logprobs=True, top_logprobs=2, ignore_eos=True),
    "schema": chat(seed=4, response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS}}),
    "greedy schema": chat(
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "w", "schema": PARAMETERS}},
    ),
    "greedy penalties": completion(
        temperature=0, ignore_eos=True, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2
    ),
    "greedy bad words": completion(temperature=0, ignore_eos=True, bad_words=["09", "3"]),
    "greedy tool": chat(temperature=0, tools=[TOOL], tool_choice="required"),
    "greedy stop": completion(temperature=0, ignore_eos=True, stop=["kelo=", "618"], min_tokens=5),
    "any tool": chat(seed=4, tools=[TOOL], tool_choice="required"),
    "named tool": chat(seed=6, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}}),
}
