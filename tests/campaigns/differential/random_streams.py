"""Random streamed requests whose features cross the seam between the first and the second token.

With `router.first_token: prefill`, prefill samples the first token and decode continues. Everything
that vLLM keeps per answer must continue exactly: random generator, grammar, tool parser, penalties,
text held back for stop strings, usage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from configs.settings.service import DEMO_SERVED_NAME
from testing.facts import RecallPrompt, make_prompt
from tests.campaigns.differential.cases import CHAT, COMPLETIONS, Case, encode, request
from tests.campaigns.differential.features import CALL, GRAMMAR, OTHER_TOOL, SCHEMA, TOOL, Fields
from tests.campaigns.differential.model import THOUGHT_ID

FACTS = (1, 3, 5, 14, 14, 30, 60, 120)
"""Numbers of facts of a prompt: 9 to 723 tokens, less than one block to several chunks."""

SHORT_LENGTHS = (1, 2, 3)
LONGEST = 40
SEEDS = 2**31

GRAMMARS: tuple[tuple[str, Fields], ...] = (
    ("regex", {"structured_outputs": {"regex": "[a-f]{6}-[0-9]{4}"}}),
    ("choice", {"structured_outputs": {"choice": ["mira", "kelo", "tiba"]}}),
    ("schema", {"structured_outputs": {"json": SCHEMA}}),
    ("EBNF", {"structured_outputs": {"grammar": GRAMMAR}}),
    ("any object", {"structured_outputs": {"json_object": True}}),
    ("split characters", {"structured_outputs": {"regex": "([äöü€😀] ?){14}"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}}),
)
TOOLS: tuple[tuple[str, Fields], ...] = (
    ("tools, auto", {"tools": [TOOL, OTHER_TOOL], "tool_choice": "auto"}),
    ("tools, required", {"tools": [TOOL, OTHER_TOOL], "tool_choice": "required"}),
    ("tools, named", {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ("tools, called", {"tools": [TOOL], "tool_choice": "auto", "structured_outputs": {"regex": CALL}}),
)
THINKING: Fields = {"chat_template_kwargs": {"thinking": True}, "logit_bias": {str(THOUGHT_ID): 9}}
"""Fields of a request with reasoning; the bias makes the model end its thoughts."""

REASONING: tuple[tuple[str, Fields], ...] = (
    ("reasoning, shown", THINKING),
    ("reasoning, hidden", THINKING | {"include_reasoning": False}),
)
LONG_FORMS = frozenset({"schema", "any object", "response_format", *(name for name, _ in TOOLS)})
"""Forms whose answers need more tokens than others."""

STREAM_OPTIONS: tuple[Fields | None, ...] = (
    {"include_usage": True},
    {"include_usage": True},
    {"include_usage": True, "continuous_usage_stats": True},
    None,
)


def stream_cases(count: int, seed: int) -> Iterator[Case]:
    """Yield `count` cases; `seed` and a case's number determine the case."""
    for number in range(count):
        name = f"seed {seed}, number {number}"
        yield _case(name, Random(f"streams {name}"))


def _case(name: str, rng: Random) -> Case:
    path = rng.choice((COMPLETIONS, CHAT))
    prompt = make_prompt(rng, rng.choice(FACTS))
    features = [path]
    fields: Fields = {"model": DEMO_SERVED_NAME, "stream": True}
    if path == CHAT:
        fields["messages"] = prompt.messages
    elif rng.random() < 0.3:
        features.append("token ids as prompt")
        fields["prompt"] = encode(prompt.text)
    else:
        fields["prompt"] = prompt.text
    for name_of_part, part in (
        _sampling(rng),
        _form(rng, path),
        _logprobs(rng, path),
        _penalties(rng),
        _stream_options(rng),
    ):
        if name_of_part:
            features.append(name_of_part)
        fields |= part
    length = _length(rng, features)
    features.append(f"max_tokens {length}" if length in SHORT_LENGTHS else "longer")
    fields["max_completion_tokens" if path == CHAT and rng.random() < 0.5 else "max_tokens"] = length
    if not _is_formed(features):
        if rng.random() < 0.55:
            features.append("stop strings")
            fields |= _stop(rng, prompt, path)
        if rng.random() < 0.5:
            fields["ignore_eos"] = True
        if rng.random() < 0.15:
            features.append("min_tokens")
            fields["min_tokens"] = rng.randint(1, length)
        if rng.random() < 0.15:
            features.append("bad_words")
            first, rest = _likely(prompt, path)
            fields["bad_words"] = [first + rest[0]]  # forbids the likely second token after the first
    if rng.random() < 0.85:
        features.append("token ids in events")
        fields["return_token_ids"] = True
    return Case(f"{name}: {', '.join(features)}", (request(path, fields),), "remote", features=tuple(features))


def _sampling(rng: Random) -> tuple[str, Fields]:
    if rng.random() < 0.45:
        return "greedy", {"temperature": 0}
    more = rng.choice(({}, {}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.02}))
    return "seeded", {"temperature": rng.choice((0.5, 1.0, 1.0, 1.5, 2.0)), "seed": rng.randrange(SEEDS), **more}


def _form(rng: Random, path: str) -> tuple[str, Fields]:
    kind = rng.random()
    if kind < 0.25:
        name, fields = rng.choice(GRAMMARS)
        return f"grammar, {name}", fields
    if kind < 0.55 and path == CHAT:
        return rng.choice(TOOLS)
    if kind < 0.63 and path == CHAT:
        return rng.choice(REASONING)
    return "", {}


def _is_formed(features: list[str]) -> bool:
    return any(name.startswith(("grammar", "tools", "reasoning")) for name in features)


def _logprobs(rng: Random, path: str) -> tuple[str, Fields]:
    if rng.random() < 0.6:
        return "", {}
    most = rng.randint(0, 5)
    return "logprobs", {"logprobs": True, "top_logprobs": most} if path == CHAT else {"logprobs": most}


def _penalties(rng: Random) -> tuple[str, Fields]:
    if rng.random() < 0.65:
        return "", {}
    values = {
        "presence_penalty": rng.choice((-0.5, 0.5, 1.2)),
        "frequency_penalty": rng.choice((-0.3, 0.4, 0.9)),
        "repetition_penalty": rng.choice((0.9, 1.1, 1.3)),
    }
    names = rng.sample(sorted(values), rng.randint(1, len(values)))
    return "penalties", {name: values[name] for name in names}


def _stream_options(rng: Random) -> tuple[str, Fields]:
    options = rng.choice(STREAM_OPTIONS)
    if options is None:
        return "no stream options", {}
    return "usage in all events" if len(options) > 1 else "usage", {"stream_options": options}


def _length(rng: Random, features: list[str]) -> int:
    if rng.random() < 0.35:
        return rng.choice(SHORT_LENGTHS)
    if any(name.removeprefix("grammar, ") in LONG_FORMS for name in features):
        return 2 * LONGEST
    return rng.randint(SHORT_LENGTHS[-1] + 1, LONGEST)


def _stop(rng: Random, prompt: RecallPrompt, path: str) -> Fields:
    """Return stop strings that the model's likely answer completes at, across or after the seam, or
    begins at the seam and does not complete.
    """
    first, rest = _likely(prompt, path)
    across = [first[-1] + rest[:length] for length in (1, 1, 2, 3)]
    begun = [first[-1] + "@", first[-1] + rest[0] + "@"]
    candidates = [*across, *across, *begun, first, rest[0], rest[-2:]]
    stop = list(dict.fromkeys(rng.sample(candidates, rng.randint(1, 3))))
    return {
        "stop": stop[0] if len(stop) == 1 and rng.random() < 0.5 else stop,
        **({"include_stop_str_in_output": True} if rng.random() < 0.4 else {}),
    }


def _likely(prompt: RecallPrompt, path: str) -> tuple[str, str]:
    """Return the first token of the model's likely answer, and the rest: a token per character.

    A completion answers `427`, a chat `mira=427`.
    """
    if path == CHAT:
        return prompt.question_name, f"={prompt.answer}"
    return prompt.answer[0], prompt.answer[1:]


def with_fields(case: Case, **fields: Any) -> Case:
    """Return `case` with `fields` set in the bodies of its requests."""
    requests = tuple(
        replace(one, content=json.dumps({**json.loads(one.content), **fields}).encode()) for one in case.requests
    )
    return replace(case, requests=requests)
