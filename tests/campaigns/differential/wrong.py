"""Wrong requests: status and error of both sides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from configs.settings.service import DEMO_SERVED_NAME
from tests.campaigns.differential.cases import ABSENT, CHAT, COMPLETIONS, JSON_TYPE, RESPONSES, Case, Request, request
from tests.campaigns.differential.features import BUILDERS, SCHEMA, TOOL
from tests.campaigns.differential.others import FRAMEWORK

OURS = "the router refuses it before any engine sees it, in its own words"

EVERYWHERE: dict[str, Any] = {
    "model": ["other", 5, ""],
    "temperature": [-1, 3, "hot", [], 1e308],
    "top_p": [0, -0.1, 1.5, "x"],
    "top_k": [-2, 1.5, "x"],
    "min_p": [-1, 2],
    "presence_penalty": [-3, 3, "x"],
    "frequency_penalty": [-3, 3],
    "repetition_penalty": [0, -1],
    "seed": ["x", 1.5, 2**63],
    "stop": ["", [""], 5, [5]],
    "stop_token_ids": ["x", [-1], ["a"]],
    "stream": ["maybe", 3],
    "ignore_eos": ["maybe"],
    "logit_bias": [{"x": 1}, {"5": "x"}, {"1000000": 1}, {"-1": 1}, "x", {"5": 200}],
    "priority": ["x", 2**70],
    "cache_salt": ["", 5],
    "user": [5],
    "structured_outputs": [
        {"regex": "["},
        {"regex": "a", "choice": ["b"]},
        {"json": "{"},
        {"json": {"type": "nothing"}},
        {"grammar": "::="},
        {"choice": []},
        {},
        {"nothing": 1},
    ],
    "vllm_xargs": [5, {"a": {"b": 1}}],
}
GENERATING: dict[str, Any] = {
    "n": [0, -1, 1.5, "two", 100_000],
    "min_tokens": [-1, 100, "x"],
    "stream_options": [{"include_usage": True}, "x", {"include_usage": 5}],
    "prompt_logprobs": [-2, 21, "x"],
    "truncate_prompt_tokens": [-2, 5000, "x", 0],
    "truncation_side": ["middle"],
    "allowed_token_ids": [[], [-1], [10**6], "x"],
    "bad_words": ["x", [5]],
    "response_format": [
        {"type": "nothing"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        "json",
        {"type": "structural_tag"},
    ],
    "logprob_token_ids": [[1], [10**6], "x"],
    "thinking_token_budget": [-5, "x"],
    "stream_interval": [0, "x"],
    "repetition_detection": [{"max_pattern_size": -1}, "x"],
    "return_token_ids": ["x"],
    "use_beam_search": ["x"],
}
AT: dict[str, dict[str, Any]] = {
    COMPLETIONS: {
        "max_tokens": [-1, "many", 1.5, 100_000],
        "prompt": [
            None,
            "",
            [],
            [[]],
            5,
            {},
            [None],
            [-1],
            [1.5],
            [10**6],
            ["a", [1]],
            [True],
            ABSENT,
            [2, 10**9],
            "!" * 3000,
        ],
        "logprobs": [-2, 21, "x", True],
        "echo": ["x"],
        "best_of": [0, "x"],
        "suffix": [5],
        "prompt_embeds": ["AAAA", 5],
    },
    CHAT: {
        "max_tokens": [-1, "many", 100_000],
        "max_completion_tokens": [-1, 0, "many", 100_000],
        "messages": [
            ABSENT,
            None,
            [],
            "hi",
            [[]],
            [{}],
            [{"role": "user"}],
            [{"role": "nobody", "content": "x"}],
            [{"content": "x"}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": [{"type": "nothing"}]}],
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}],
            [{"role": "tool", "content": "x"}],
            [{"role": "user", "content": "!" * 3000}],
        ],
        "logprobs": ["x", 5],
        "top_logprobs": [3, -2, "x"],
        "tools": [[], "x", [{}], [{"type": "function"}], [{"type": "function", "function": {}}]],
        "tool_choice": [
            "auto",
            "required",
            "some",
            {"type": "function"},
            {"type": "function", "function": {"name": "x"}},
        ],
        "chat_template_kwargs": ["x"],
        "chat_template": ["{{ messages }}", "{{"],
        "add_generation_prompt": ["x"],
        "continue_final_message": [True],
        "reasoning_effort": ["huge", 5],
        "documents": ["x"],
    },
    RESPONSES: {
        "max_output_tokens": [-1, 0, "many", 100_000],
        "input": [ABSENT, None, "", [], 5, [{}], [{"role": "user"}], [{"type": "nothing"}], "!" * 3000],
        "top_logprobs": [3, -2, "x"],
        "include": [["nothing"], "x"],
        "tools": ["x", [{}], [{"type": "nothing"}], [{"type": "function"}]],
        "tool_choice": ["required", "some", {"type": "function", "name": "x"}],
        "text": ["x", {"format": {"type": "nothing"}}, {"format": {"type": "json_schema"}}],
        "reasoning": ["x", {"effort": "huge"}],
        "truncation": ["some"],
        "previous_response_id": ["resp_0", "", 5],
        "metadata": ["x", {"a": 5}],
        "background": ["x"],
        # At the other endpoints, vLLM answers these with a 500, and the router with a 400.
        "structured_outputs": ["x", []],
        "prompt": ["x", {"id": "p"}],
    },
}

OF_THE_ROUTER: tuple[tuple[str, Any], ...] = (("n", 100_000), ("structured_outputs", "x"), ("structured_outputs", []))
"""Wrong values that the router refuses itself, and vLLM too."""

BREAKS = "vLLM's Responses API breaks the connection at an engine's refusal in a stream"
BROKEN_OFF = ((RESPONSES, "structured_outputs", {"regex": "["}),)
"""Values to which the single server does not answer if the request is streamed."""

PAIRS: tuple[tuple[str, dict[str, Any]], ...] = (
    (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}),
    (COMPLETIONS, {"echo": True, "use_beam_search": True, "logprobs": 1, "n": 2}),
    (COMPLETIONS, {"use_beam_search": True, "stream": True, "n": 2}),
    (COMPLETIONS, {"n": 2, "temperature": 0, "best_of": 1}),
    (COMPLETIONS, {"min_tokens": 9, "max_tokens": 8}),
    (CHAT, {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}),
    (CHAT, {"tools": [TOOL], "tool_choice": "some"}),
    (CHAT, {"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"json": SCHEMA}}),
    (CHAT, {"top_logprobs": 3, "logprobs": False}),
    (CHAT, {"logprobs": True, "top_logprobs": 21}),
    (CHAT, {"stream": True, "prompt_logprobs": 1}),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}),
    (
        RESPONSES,
        {
            "structured_outputs": {"json": SCHEMA},
            "text": {"format": {"type": "json_schema", "name": "w", "schema": SCHEMA}},
        },
    ),
    (RESPONSES, {"stream": True, "background": True}),
)


def wrong_cases() -> Iterator[Case]:
    """Yield each wrong value in an otherwise valid request; a field's first also streamed."""
    for path, build in BUILDERS.items():
        tables = (EVERYWHERE, {} if path == RESPONSES else GENERATING, AT[path])
        for table in tables:
            for field, values in table.items():
                for value in values:
                    shown = "left out" if value is ABSENT else repr(value)[:60]
                    name = f"{path} wrong {field}: {shown}"
                    wrong = request(path, build(name, **{field: value}))
                    ours = OURS if (field, value) in OF_THE_ROUTER else ""
                    words: dict[str, Any] = {"message_differs": ours, "only_status": ours if field == "n" else ""}
                    yield Case(name, (wrong,), **words)
                    if value is values[0] and field not in ("stream", "stream_options"):
                        name += ", streamed"
                        breaks = BREAKS if (path, field, value) in BROKEN_OFF else ""
                        streamed = request(path, build(name, stream=True, **{field: value}))
                        yield Case(name, (streamed,), **words, unanswered=breaks)
    for path, fields in PAIRS:
        name = f"{path} wrong together: {sorted(fields)} {str(sorted(fields.items()))[:120]}"
        yield Case(name, (request(path, BUILDERS[path](name, **fields)),))


def broken_cases() -> Iterator[Case]:
    """Yield bodies that are no valid request, and unusual content types."""
    bodies = {
        "no JSON": b"{",
        "a list": b"[]",
        "text": b'"x"',
        "nothing": b"",
        "null": b"null",
        "no UTF-8": b'{"a": "\xff"}',
    }
    for path in BUILDERS:
        for name, content in bodies.items():
            framework = FRAMEWORK if name == "no UTF-8" else ""
            yield Case(f"{path} {name}", (Request(path, content),), message_differs=OURS, only_status=framework)
        for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
            headers = JSON_TYPE | {"content-type": kind}
            body = BUILDERS[path](f"{path} {kind}")
            yield Case(f"{path} sent as {kind or 'nothing'}", (request(path, body, headers),))
        body = BUILDERS[path](f"{path} charset")
        headers = {"content-type": "application/json; charset=utf-8"}
        yield Case(f"{path} sent with a charset", (request(path, body, headers),), "remote")
        yield Case(f"{path} nothing but a model", (request(path, {"model": DEMO_SERVED_NAME}),))
        yield Case(f"{path} an empty object", (request(path, {}),))
