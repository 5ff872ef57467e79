"""Access log of a router: one JSON line per HTTP request, except for UNLOGGED_PATHS.

A line has no text of the answer and no API key, only the first digits of the key's digest. With
`router.request_log`, it also has the parameters of the request, or the whole body with the prompt.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.request import KEEP_ALIVE
from actors.telemetry.recent_requests import MAX_ID_CHARACTERS

UNLOGGED_PATHS = frozenset({"/", "/health", "/ping", "/load", "/metrics", "/tandem/status", "/tandem/service"})
"""Paths of probes, scrapers and the status page, which are not logged."""

MAX_PATH_CHARACTERS = 200

FILE_BYTES = 64 << 20
OLD_FILES = 3
"""Number of rotated log files that a router keeps, besides the current one of FILE_BYTES."""

ENTRY = "tandem.access"
"""Key of a request's `AccessEntry` in its ASGI scope."""

RequestLog = Literal["off", "parameters", "text"]

SHOWN_TEXTS = frozenset({"model", "type", "tool_choice", "reasoning_effort", "service_tier", "encoding_format"})
"""Fields of a body whose strings `parameters_of` keeps, cut to MAX_PATH_CHARACTERS.

It replaces other strings by their lengths.
"""

_USAGE = (b'"usage":{', b'"usage": {')
_TOKENS = {
    "prompt_tokens": re.compile(rb'"(?:prompt|input)_tokens": ?(\d+)'),
    "completion_tokens": re.compile(rb'"(?:completion|output)_tokens": ?(\d+)'),
    "cached_tokens": re.compile(rb'"cached_tokens": ?(\d+)'),
}
_USAGE_BYTES = 400
"""Number of bytes that are searched for counts of tokens, from the start of a usage object."""


@dataclass
class AccessEntry:
    """Log entry of one request.

    `AccessLog` creates it with the client's `request_id`, if any, and calls `sent`. The HTTP layer
    sets `key` and the final `request_id`, and calls `received` and `answered`.
    """

    request_id: str | None
    request_log: RequestLog = "off"
    request: Any = None
    """Body or parameters of the request, according to `request_log`.

    None if `request_log` is `off`, if the router has not read a valid body, or if the request's
    path is none of `Endpoint`.
    """
    key: str | None = None
    """First 8 hexadecimal digits of the digest of the API key; None without a valid key."""
    answer: dict[str, Any] = field(default_factory=dict)
    status: int | None = None
    first_byte_at: float | None = None
    sent_bytes: int = 0
    complete: bool = False
    usage: dict[str, int] = field(default_factory=dict)

    def received(self, body: Mapping[str, Any]) -> None:
        """Store the body of the request or its parameters, according to `request_log`."""
        if self.request_log != "off":
            self.request = body if self.request_log == "text" else parameters_of(body)

    def answered(self, **fields: Any) -> None:
        """Add fields to the line, for example `route`, or the `late_status` of a failed stream."""
        self.answer |= fields

    def sent(self, message: Message) -> None:
        """Update the entry from one ASGI message of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        body: bytes = message.get("body", b"")
        if body and body != KEEP_ALIVE and self.first_byte_at is None:
            self.first_byte_at = time.monotonic()
        self.complete = not message.get("more_body", False)
        self.relayed(len(body), body)

    def relayed(self, sent_bytes: int, body: bytes) -> None:
        """Count bytes of the response, and read the token counts in `body`, a part of them."""
        self.sent_bytes += sent_bytes
        # Cannot match within a string of the answer, where quotes are escaped.
        if (at := max(map(body.rfind, _USAGE))) >= 0:
            usage = body[at : at + _USAGE_BYTES]
            self.usage = {name: int(match[1]) for name, one in _TOKENS.items() if (match := one.search(usage))}


class AccessLog:
    """ASGI middleware that writes a line when a request has ended, also with an exception.

    Writes none for UNLOGGED_PATHS and for connections that are not HTTP.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], None], request_log: RequestLog = "off") -> None:
        self._app = app
        self._write = write
        self._request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path in UNLOGGED_PATHS:
            await self._app(scope, receive, send)
            return
        began_at = time.monotonic()
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        entry = AccessEntry(None if given is None else given.decode("latin-1"), self._request_log)

        async def noted(message: Message) -> None:
            await send(message)
            entry.sent(message)

        try:
            await self._app({**scope, ENTRY: entry}, receive, noted)
        finally:
            self._write(line_of(scope, path, entry, began_at))


def line_of(scope: Mapping[str, Any], path: str, entry: AccessEntry, began_at: float) -> str:
    """Return the line of a request that began at `began_at` (monotonic seconds) and ended now."""
    now = time.monotonic()
    client = scope.get("client")
    line: dict[str, Any] = {
        "at": datetime.fromtimestamp(time.time() - (now - began_at), UTC).isoformat(timespec="milliseconds"),
        "request_id": entry.request_id and entry.request_id[:MAX_ID_CHARACTERS],
        "client": client[0] if client else None,
        "key": entry.key,
        "method": scope["method"],
        "path": path[:MAX_PATH_CHARACTERS],
        "status": entry.status,
        "complete": entry.complete,
        "sent_bytes": entry.sent_bytes,
        "first_byte_ms": None if entry.first_byte_at is None else _ms(entry.first_byte_at - began_at),
        "total_ms": _ms(now - began_at),
        **entry.answer,
        **entry.usage,
        **({} if entry.request is None else {"request": entry.request}),
    }
    return json.dumps(line)


def parameters_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's body with lengths instead of strings and lists, also in its objects.

    Keeps the strings of SHOWN_TEXTS, numbers, booleans and null. Cuts names and strings to
    MAX_PATH_CHARACTERS.
    """
    return {
        str(name)[:MAX_PATH_CHARACTERS]: parameters_of(value) if isinstance(value, Mapping) else _shown(name, value)
        for name, value in body.items()
    }


def _shown(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return value[:MAX_PATH_CHARACTERS] if name in SHOWN_TEXTS else f"{len(value)} characters"
    return f"{len(value)} items" if isinstance(value, list) else value


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def open_access_log(folder: Path, replica: str) -> Callable[[str], None]:
    """Return a function that appends a line to `access-<replica>.log` in `folder`.

    Rotates the file at FILE_BYTES. Raises OSError if the file cannot be opened.
    """
    handler = RotatingFileHandler(folder / f"access-{replica}.log", maxBytes=FILE_BYTES, backupCount=OLD_FILES)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger(f"{__name__}.{replica}")
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    return log.info
