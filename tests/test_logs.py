"""Log messages that quote clients and peers."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from connectors.logs import MAX_CHARACTERS, escape_log_arguments, log_to, log_with_vllm
from tests.actors.test_process import loggers

__all__ = ["loggers"]  # a fixture

FORGED = "a\r\nINFO 11-27\x85b\u2028c\x1b[0m\ud800"
ESCAPED = r"a\r\nINFO 11-27\x85b\u2028c\x1b[0m\ud800"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    factory = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    escape_log_arguments.cache_clear()
    yield
    logging.setLogRecordFactory(factory)
    escape_log_arguments.cache_clear()


def message(text: str, *args: object, name: str = "connectors.a") -> str:
    return logging.getLogger(name).makeRecord(name, 30, "f", 1, text, args, None).getMessage()


@pytest.mark.parametrize(
    ("text", "args", "logged"),
    [
        ("%s %d %r", (FORGED, 5, "a\nb"), f"{ESCAPED} 5 'a\\nb'"),
        ("%s %r", (ValueError(FORGED), ValueError("a\nb")), f"{ESCAPED} ValueError('a\\nb')"),
        ("%(a)s", ({"a": "b\nc"},), "b\\nc"),
        ("%s", ("x" * (MAX_CHARACTERS + 1),), "x" * MAX_CHARACTERS + f"... ({MAX_CHARACTERS + 1} characters)"),
        ("own\nlines %s", ("é",), "own\nlines é"),
    ],
)
def test_an_argument_stays_on_one_line_and_has_a_limit(text: str, args: Any, logged: str) -> None:
    escape_log_arguments()
    assert message(text, *args) == logged


def test_only_the_named_loggers_are_changed() -> None:
    """vLLM's own lines stay as they are."""
    log_with_vllm()
    assert [message("%s", "a\nb", name=name) for name in ("connectors.a", "connectors2", "vllm")] == [
        "a\\nb",
        "a\nb",
        "a\nb",
    ]


@pytest.mark.parametrize("name", ["actors.router", "vllm"])
def test_an_actor_escapes_what_it_and_its_libraries_log(loggers: None, name: str) -> None:
    log_to(io.StringIO(), "Router")
    assert message("%s", "a\nb", name=name) == "a\\nb"
