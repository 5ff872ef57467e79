"""Options of a campaign or benchmark, from its function's signature and words as ``COUNT=20``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def shown(options: Mapping[str, Any]) -> str:
    """Return options as words."""
    texts = {name: ",".join(map(str, one)) if isinstance(one, tuple) else one for name, one in options.items()}
    return " ".join(f"{name.upper()}={text}" for name, text in texts.items())


def parse(function: Callable[..., Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the options of ``function`` with those of ``words`` (``NAME=value``) replaced.

    Values separated by commas or spaces replace a tuple. Raises SystemExit for an unknown option
    and for a value of another type.
    """
    options = defaults(function)
    for word in words:
        name, _, value = word.partition("=")
        if name.lower() not in options or "=" not in word:
            raise SystemExit(f"no option {word}; known, with their defaults: {shown(options) or 'none'}")
        options[name.lower()] = _value(word, value, options[name.lower()])
    return options


def _value(word: str, value: str, default: Any) -> Any:
    kind = type(default)
    if not value and (default or kind is not str):
        return default
    try:
        if kind is tuple:
            return tuple(type(default[0])(one) if default else one for one in value.replace(",", " ").split())
        return value not in ("0", "no") if kind is bool else kind(value)
    except ValueError:
        raise SystemExit(f"{word}: must be of type {kind.__name__}") from None
