"""Log lines of Tandem's packages in vLLM's format, rate-limited, in every process of a service.

vLLM gives a handler to its own logger only. Without a handler of ours, INFO lines would appear
nowhere, and warnings would appear on stderr without time, level and process. Each message stays on
one line, whatever text of a client or a peer it quotes.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TextIO

PACKAGES = ("actors", "app", "connectors")
CONNECTORS = PACKAGES[-1:]
"""The packages that run in vLLM's processes; a user's own may have the other names."""

MAX_CHARACTERS = 2**16
"""Number of characters of one argument of a log message that are logged."""

EVERY_S = 10.0
MOST_LINES = 5
"""Maximum number of lines of one log statement in EVERY_S seconds. Does not apply to DEBUG."""

_FORMAT = "({process} pid=%(process)d) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
_DATE_FORMAT = "%m-%d %H:%M:%S"


class RateLimitedHandler(logging.Handler):
    """Handler that passes on at most MOST_LINES records of one log statement in EVERY_S seconds.

    The first record after a pause states how many were omitted.
    """

    def __init__(self, handle: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self.handle_record = handle
        self._statements: dict[tuple[str, int], list[float]] = {}
        """For each statement: start of its interval, lines in it, lines omitted."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno <= logging.DEBUG:
            self.handle_record(record)
            return
        now = time.monotonic()
        state = self._statements.setdefault((record.pathname, record.lineno), [now, 0, 0])
        if now - state[0] >= EVERY_S:
            state[:2] = now, 0
        if state[1] == MOST_LINES:
            state[2] += 1
            return
        state[1] += 1
        if state[2]:
            record = copy.copy(record)
            record.msg, record.args = f"{record.getMessage()} ({state[2]:.0f} similar lines omitted)", None
            state[2] = 0
        self.handle_record(record)


def log_to(stream: TextIO, process: str) -> None:
    """Write the lines of this process to `stream`, each with its quoted texts on one line."""
    escape_log_arguments()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter(_FORMAT.format(process=process), _DATE_FORMAT))
    _set(PACKAGES, RateLimitedHandler(handler.handle), logging.INFO)


class _VllmHandler(RateLimitedHandler):
    """Passes records to vLLM's logger, or to `before` until vLLM has configured its logger."""

    def __init__(self, before: RateLimitedHandler | None) -> None:
        super().__init__(self._to_vllm)
        self._before = before
        self._vllm = logging.getLogger("vllm")

    def _to_vllm(self, record: logging.LogRecord) -> None:
        # vLLM replaces the handlers of its logger when it reads its arguments.
        if self._vllm.handlers or self._before is None:
            self._vllm.handle(record)
        else:
            self._before.handle_record(record)


def log_with_vllm() -> None:
    """Pass the lines of the connectors in this process to vLLM's logger, at its level.

    Until vLLM has configured its logger, the handler of `log_to` gets them; without that, and with
    VLLM_CONFIGURE_LOGGING=0, the handlers of the root logger.
    """
    escape_log_arguments(*CONNECTORS)
    handlers = logging.getLogger(CONNECTORS[0]).handlers
    current = next((one for one in handlers if isinstance(one, RateLimitedHandler)), None)
    handler = current if isinstance(current, _VllmHandler) else _VllmHandler(current)
    _set(CONNECTORS, handler, logging.getLogger("vllm").level or logging.INFO)


def _set(packages: Sequence[str], handler: RateLimitedHandler, level: int) -> None:
    for name in packages:
        logger = logging.getLogger(name)
        logger.handlers = [one for one in logger.handlers if not isinstance(one, RateLimitedHandler)] + [handler]
        logger.setLevel(level)
        logger.propagate = False


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
