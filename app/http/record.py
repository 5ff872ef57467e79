"""One record of each request, and what reports it: metrics, status page, trace and access log.

A client that sends `x-tandem-explain: 1`, with an operator's key if there are keys, receives two
headers, unless the answer is an error: `x-tandem-decision`, the routing decision and its inputs,
and `Server-Timing`, the latency breakdown in the W3C format that browsers' developer tools display.
If a stream has begun with keep-alive comments, the two headers are SSE comments.

The access log has one JSON line per HTTP request, except for UNLOGGED_PATHS. A line has no text of
the answer and no API key, only the first digits of the key's digest. With `router.request_log`, it
also has the parameters of the request, or the whole body with the prompt.
"""

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from http import HTTPStatus
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any, Literal, Self

from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.request import KEEP_ALIVE
from actors.router.client_request import ClientRequest
from actors.router.model_router import ModelRouter
from actors.router.prompt_lists import AnyAnswer
from actors.telemetry.latency_breakdown import LatencyBreakdown
from actors.telemetry.router_metrics import MAX_ID_CHARACTERS, RecentRequest, RouterMetrics, now_unix
from app.http.parsing import path_of
from app.http.traces import RequestTrace, Traces

RECORD = "tandem.record"
"""Key of a request's `RequestRecord` in its ASGI scope, with an access log."""

UNLOGGED_PATHS = frozenset({"/", "/health", "/ping", "/load", "/metrics", "/tandem/status", "/tandem/service"})
"""Paths of probes, scrapers and the status page, which are not logged."""

MAX_PATH_CHARACTERS = 200

FILE_BYTES = 64 << 20
OLD_FILES = 3
"""Number of rotated log files that a router keeps, besides the current one of FILE_BYTES."""

RequestLog = Literal["off", "parameters", "text"]

SHOWN_TEXTS = frozenset({"model", "type", "tool_choice", "reasoning_effort", "service_tier", "encoding_format"})
"""Fields of a body whose strings `parameters_of` keeps; it logs the lengths of others."""

ACCOUNT_S = 0.5
"""Maximum wait in seconds for the prefill engine's timings before an explained answer is sent.

The timings normally arrive before decode's first token, on a busy machine milliseconds after it.
"""

REFUSED = "refused"
"""Label `route`, in the metrics, of a request that got an error instead of an answer."""

LEFT = "left"
"""Label `route` of a request whose client disconnected before the answer started."""

CLIENT_CLOSED_REQUEST = 499
"""Label `status` of a `left` request in the metrics: the non-standard code that nginx logs."""

DISCONNECTS = (ClientDisconnect, TaskCancelledError, asyncio.CancelledError)
"""Errors of a request whose client has disconnected, or which Serve's proxy cancels."""

_USAGE = (b'"usage":{', b'"usage": {')
_TOKENS = {
    "prompt_tokens": re.compile(rb'"(?:prompt|input)_tokens": ?(\d+)'),
    "completion_tokens": re.compile(rb'"(?:completion|output)_tokens": ?(\d+)'),
    "cached_tokens": re.compile(rb'"cached_tokens": ?(\d+)'),
}
_USAGE_BYTES = 400
"""Number of bytes that are searched for counts of tokens, from the start of a usage object."""


class RequestRecord:
    """Status, times, engines and counts of one HTTP request.

    `AccessLog` creates it for every request that it logs, `Generate` for its own without a log.
    """

    def __init__(self, request_id: str | None = None, request_log: RequestLog = "off", logged: bool = False) -> None:
        self.request_id = request_id
        self._logs = logged
        self.key: str | None = None
        """First 8 hexadecimal digits of the digest of the API key; None without a valid key."""
        self.complete = False
        """Whether the whole response was sent."""
        self.line: dict[str, Any] = {}
        """Further fields of the access log, for example `late_status` of a failed stream."""
        self._request_log = request_log
        self._logged: Any = None
        self._status: int | None = None
        self._first_byte_at: float | None = None
        self._sent_bytes = 0
        self._usage: dict[str, int] = {}
        self._began_at = time.monotonic()
        self.metrics: RouterMetrics | None = None
        """Metrics that count the request: the router's until the request's model is known."""
        self._counted = self._kept = False
        self._request: ClientRequest | None = None
        self._model: ModelRouter | None = None
        self._trace: RequestTrace | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        assert self.metrics is not None, "set by `Generate`"
        # Serve's proxy also cancels the task after it has received the whole answer.
        if isinstance(error, DISCONNECTS) and not self.complete:
            self.metrics.disconnects.inc()
            self.count(LEFT, None, CLIENT_CLOSED_REQUEST)
        if self._trace is not None:
            self._trace.end(error)

    def received(self, request: ClientRequest) -> None:
        """Keep the body of a valid request or its parameters, according to `request_log`."""
        self.request_id = request.request_id
        if self._request_log != "off":
            self._logged = request.body if self._request_log == "text" else parameters_of(request.body)

    def serve(self, model: ModelRouter, request: ClientRequest, traces: Traces | None) -> ClientRequest:
        """Return the request for the engines of `model`, with the trace's headers."""
        self._model, self.metrics = model, model.metrics
        if traces is not None:
            self._trace = traces.begin(request)
            request = self._trace.request
        self._request = request
        return request

    def count(self, route: str, reason: str | None, status: int) -> None:
        """Count the request in the metrics at the first call; ignore later calls."""
        if not self._counted and self.metrics is not None:
            self._counted = True
            self.metrics.requests.labels(route, reason or "", status).inc()

    async def explanation(self, answer: AnyAnswer) -> Iterable[tuple[bytes, bytes]]:
        """Return the explanation headers, if the client may have them; wait at most ACCOUNT_S.

        Call this after the first bytes of the answer have arrived.
        """
        if answer.explanation is None or answer.start.status >= HTTPStatus.BAD_REQUEST:
            return ()
        await answer.account(ACCOUNT_S)
        return (b"x-tandem-decision", answer.explanation.encode()), server_timing(answer.breakdown)

    def keep(self, answer: AnyAnswer, over: bool = False) -> None:
        """Report the breakdown of an answer once: when all timings are known, or with `over`.

        Call this after the first bytes, which it must not delay, and with `over` after the end.
        """
        assert self._model is not None
        assert self._request is not None
        status = answer.start.status
        if over and self._logs and status < HTTPStatus.BAD_REQUEST:
            self.line |= {
                **({"model": self._model.names[0]} if self._model.names else {}),
                "route": answer.route,
                "reason": answer.local_reason,
                **asdict(answer.pair),
                "stream": answer.start.streams,
                "parts_ms": {part: round(seconds * 1e3, 3) for part, seconds in answer.breakdown.parts.items()},
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
            }
        if self._kept or not (over or answer.accounted):
            return
        self._kept = True
        if self._trace is not None:
            self._trace.answered(answer)
        if status < HTTPStatus.BAD_REQUEST:
            self._model.metrics.observe_breakdown(answer.route, answer.breakdown)
            self._model.recent.append(
                RecentRequest(
                    self._request.request_id[:MAX_ID_CHARACTERS],
                    now_unix(self._request.arrived_at),
                    self._request.endpoint,
                    answer.route,
                    answer.local_reason,
                    status,
                    answer.start.streams,
                    answer.pair,
                    answer.breakdown,
                )
            )

    def sent(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            return
        body: bytes = message.get("body", b"")
        if body and body != KEEP_ALIVE and self._first_byte_at is None:
            self._first_byte_at = time.monotonic()
        self.complete = not message.get("more_body", False)
        self.relayed(len(body), body)

    def relayed(self, sent_bytes: int, body: bytes) -> None:
        """Count bytes of the response, and read the token counts in `body`, a part of them."""
        self._sent_bytes += sent_bytes
        # Cannot match within a string of the answer, where quotes are escaped.
        if (at := max(map(body.rfind, _USAGE))) >= 0:
            usage = body[at : at + _USAGE_BYTES]
            self._usage = {name: int(match[1]) for name, one in _TOKENS.items() if (match := one.search(usage))}

    def log_line(self, scope: Scope, path: str) -> str:
        now, client = time.monotonic(), scope.get("client")
        line: dict[str, Any] = {
            "at": datetime.fromtimestamp(now_unix(self._began_at), UTC).isoformat(timespec="milliseconds"),
            "request_id": self.request_id and self.request_id[:MAX_ID_CHARACTERS],
            "client": client[0] if client else None,
            "key": self.key,
            "method": scope["method"],
            "path": path[:MAX_PATH_CHARACTERS],
            "status": self._status,
            "complete": self.complete,
            "sent_bytes": self._sent_bytes,
            "first_byte_ms": None if self._first_byte_at is None else _ms(self._first_byte_at - self._began_at),
            "total_ms": _ms(now - self._began_at),
            **self.line,
            **self._usage,
            **({} if self._logged is None else {"request": self._logged}),
        }
        return json.dumps(line)


class AccessLog:
    """ASGI middleware that writes a line when a request has ended, also with an exception."""

    def __init__(self, app: ASGIApp, write: Callable[[str], None], request_log: RequestLog = "off") -> None:
        self._app = app
        self._write = write
        self._request_log = request_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope)
        if scope["type"] != "http" or path in UNLOGGED_PATHS:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        record = RequestRecord(None if given is None else given.decode("latin-1"), self._request_log, True)

        async def noted(message: Message) -> None:
            await send(message)
            record.sent(message)

        try:
            await self._app({**scope, RECORD: record}, receive, noted)
        finally:
            self._write(record.log_line(scope, path))


def server_timing(breakdown: LatencyBreakdown) -> tuple[bytes, bytes]:
    """Return the Server-Timing header: the parts of the breakdown and their sum, in ms."""
    entries = [*breakdown.parts.items(), ("total", breakdown.total_s)]
    return b"server-timing", ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in entries).encode()


def parameters_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's body; lengths replace lists, and all strings outside SHOWN_TEXTS."""
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

    Raises OSError if the file cannot be opened.
    """
    handler = RotatingFileHandler(folder / f"access-{replica}.log", maxBytes=FILE_BYTES, backupCount=OLD_FILES)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger(f"{__name__}.{replica}")
    log.propagate = False
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    return log.info
