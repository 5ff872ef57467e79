"""Detect a chat template that renders the time.

Prefill and decode render the template of a request separately. Different times make different
prompts, so no KV is transferred and decode computes every prompt.
"""

import re
from collections.abc import Mapping
from typing import Any

REMEDY = "send the time in a message or in chat_template_kwargs, or set frontend.chat_template to a template without it"

_CALL = re.compile(r"strftime_now\s*\(\s*(?:(?P<quote>['\"])(?P<format>.*?)(?P=quote))?")
_OF_A_DAY = set("aAwdbBmyYjUWGuVxDFeChg%")
"""Directives of `strftime` whose results change at most once a day."""


def renders_time(template: str | Mapping[str, str]) -> bool:
    """Return whether a template, or one of several, calls transformers' `strftime_now` for a time.

    A date alone, as in the templates of Llama 3, differs between the roles at midnight only.
    """
    texts = [template] if isinstance(template, str) else template.values()
    return any(_is_finer_than_a_day(call["format"]) for text in texts for call in _CALL.finditer(text))


def _is_finer_than_a_day(time_format: str | None) -> bool:
    if time_format is None:  # an expression
        return True
    return not set(re.findall(r"%[-_0^#]?(.)", time_format)) <= _OF_A_DAY


def template_of(tokenizer: Any, given: str | None) -> str | Mapping[str, str]:
    from vllm.renderers.chat_utils import load_chat_template

    return load_chat_template(given) or getattr(tokenizer, "chat_template", None) or ""
