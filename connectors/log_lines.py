"""Keep each log message on one line, whatever text of a client or a peer it quotes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache

MAX_CHARACTERS = 2**16
"""Number of characters of one argument of a log message that are logged."""


class _OneLine:
    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return one_line(str(self._value))

    def __repr__(self) -> str:
        return one_line(repr(self._value))


def one_line(text: str) -> str:
    """Escape line breaks and other unprintable characters, and cut to MAX_CHARACTERS."""
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@cache  # a second call would wrap the factory again
def escape_log_arguments(*loggers: str) -> None:
    """Apply ``one_line`` to texts and exceptions in the arguments of later log records of
    ``loggers`` and their children (none: of all loggers) in this process.

    The record factory does it, not a handler: vLLM and Ray replace handlers when they configure
    logging.
    """
    factory: Callable[..., logging.LogRecord] = logging.getLogRecordFactory()

    def make(*args: object, **named: object) -> logging.LogRecord:
        record = factory(*args, **named)
        if record.args and (not loggers or f"{record.name}.".startswith(tuple(f"{name}." for name in loggers))):
            if isinstance(record.args, Mapping):
                record.args = {name: _escaped(value) for name, value in record.args.items()}
            else:
                record.args = tuple(map(_escaped, record.args))
        return record

    logging.setLogRecordFactory(make)


def _escaped(value: object) -> object:
    if isinstance(value, str):
        return value if len(value) <= MAX_CHARACTERS and value.isprintable() else _OneLine(value)
    return _OneLine(value) if isinstance(value, BaseException | bytes | list) else value
