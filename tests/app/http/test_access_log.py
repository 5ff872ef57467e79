"""The access log: a JSON line per request with id, route, latencies and tokens, without its
text.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from app.http import generate, record
from app.http.auth import digest
from app.http.record import open_access_log
from app.http.routes import build_http
from configs.settings.router import RouterSettings
from tests.actors.behaviours import TOKENS, answers, dies, engine, fleet, hangs, request, well
from tests.actors.fleet import at_rest
from tests.app.http.servers import KEY, Client

pytestmark = pytest.mark.usefixtures("virtual_time")

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
ALWAYS = {"at", "request_id", "client", "key", "method", "path", "status", "complete", "sent_bytes"}
ALWAYS |= {"first_byte_ms", "total_ms"}
ANSWERED = {"route", "reason", "prefill", "decode", "stream", "parts_ms", "prompt_tokens", "completion_tokens"}


class Logged:
    """A router's HTTP side over in-process replicas, and its written lines."""

    def __init__(self, prefill: list[Any], decode: list[Any], *keys: str, **settings: Any) -> None:
        self.router, *self.handles = fleet(prefill, decode)
        self.lines: list[str] = []
        app = build_http(
            cast(Any, self.router),
            [digest(key) for key in keys],
            access_log=self.lines.append,
            settings=RouterSettings(**settings),
        )
        self.app = app
        transport = httpx.ASGITransport(cast(Any, app), client=("192.0.2.7", 123))
        self.http = httpx.AsyncClient(transport=transport, base_url="http://tandem")

    async def line(self) -> dict[str, Any]:
        """Return the only line, once no task runs."""
        await at_rest(*self.handles)
        (line,) = self.lines
        return cast("dict[str, Any]", json.loads(line))


async def test_a_streamed_request_over_both_engines() -> None:
    """The router counts tokens although the client has not requested usage. Probes, which arrive
    every second from many sources, are not logged.
    """
    logged = Logged([well], [engine(1, [1])], KEY)
    for probe in ("/", "/health"):
        await logged.http.get(probe)
    headers = {"x-request-id": "trace-7", "Authorization": f"Bearer {KEY}"}
    body = {"prompt": "a secret prompt", "stream": True}
    reply = await logged.http.post("/v1/completions", json=body, headers=headers)
    line = await logged.line()
    assert line.keys() == ALWAYS | ANSWERED
    fixed = {name: line[name] for name in line.keys() - {"at", "first_byte_ms", "total_ms", "parts_ms"}}
    assert fixed == {
        "request_id": "trace-7",
        "client": "192.0.2.7",
        "key": digest(KEY).hex()[:8],
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "complete": True,
        "sent_bytes": len(reply.content),
        "route": "remote",
        "reason": None,
        "prefill": "p0",
        "decode": "d0",
        "stream": True,
        "prompt_tokens": None,  # prefill's answer has no tokens here
        "completion_tokens": TOKENS,
    }
    assert 0 < line["first_byte_ms"] <= line["total_ms"]
    assert "secret" not in logged.lines[0]
    assert KEY not in logged.lines[0]


BODY = {
    "model": "m",
    "messages": [{"role": "user", "content": "a secret"}],
    "max_tokens": 5,
    "stop": "secret",
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "secret"}},
    "logit_bias": None,
}


PARAMETERS = {
    "model": "m",
    "messages": "1 items",
    "max_tokens": 5,
    "stop": "6 characters",
    "stream_options": {"include_usage": True},
    "response_format": {"type": "json_schema", "json_schema": {"name": "6 characters"}},
    "logit_bias": None,
}
"""Numbers, names, and lengths instead of texts."""


@pytest.mark.parametrize(("request_log", "logged"), [("parameters", PARAMETERS), ("text", BODY)])
async def test_requests_in_the_log(request_log: str, logged: dict[str, Any]) -> None:
    """The log has the parameters of requests, or their bodies as they were sent; no API key."""
    found = Logged([], [answers(200, {})], KEY, request_log=request_log)
    await found.http.post("/v1/chat/completions", json=BODY, headers={"Authorization": f"Bearer {KEY}"})
    assert (await found.line())["request"] == logged
    assert ("secret" in found.lines[0]) == (request_log == "text")
    assert KEY not in found.lines[0]


async def test_an_answer_tells_its_usage() -> None:
    text = 'a text with "usage":{"prompt_tokens":99}'
    logged = Logged([], [answers(200, {"choices": [{"text": text}], "usage": USAGE})])
    await logged.http.post("/v1/completions", json={"prompt": "a", "echo": True})
    line = await logged.line()
    assert (line["route"], line["reason"], line["prefill"]) == ("local", "echo", None)
    assert (line["prompt_tokens"], line["completion_tokens"], line["cached_tokens"]) == (5, 3, 2)
    assert len(line["request_id"]) == 32, "the id that the engines received"


@pytest.mark.parametrize(
    ("path", "body", "key", "status"),
    [
        ("/v1/completions", b"{", KEY, 400),
        ("/v1/completions", b'{"prompt": "a"}', "wrong", 401),
        ("/v1/nothing", b"", KEY, 404),
        ("/v1/completions", b'{"prompt": "a"}', KEY, 503),
    ],
)
async def test_refusals_are_logged(path: str, body: bytes, key: str, status: int) -> None:
    logged = Logged([], [dies], KEY)
    await logged.http.post(path, content=body, headers={"Authorization": f"Bearer {key}"})
    line = await logged.line()
    assert line.keys() == ALWAYS
    assert (line["status"], line["path"], line["complete"]) == (status, path, True)
    assert line["key"] == (None if status == 401 else digest(KEY).hex()[:8])


async def test_a_client_that_leaves_before_its_answer() -> None:
    logged = Logged([well], [hangs])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await logged.http.post("/v1/completions", json={"prompt": "a"})
    line = await logged.line()
    assert (line["status"], line["complete"], line["first_byte_ms"]) == (None, False, None)


async def test_a_client_that_takes_no_end_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log line is marked incomplete: the last write has timed out."""
    monkeypatch.setattr(generate, "STREAM_END_S", 0.1)
    logged = Logged([well], [engine(1, [1])])
    client = Client(request())

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body" and not message["more_body"]:
            await asyncio.sleep(60)

    app: Any = logged.app
    await app(client.scope, client.receive, send)
    line = await logged.line()
    assert (line["status"], line["route"], line["complete"]) == (200, "remote", False)


def test_the_file_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "FILE_BYTES", 100)
    write = open_access_log(tmp_path, "r1")
    for number in range(1000):
        write(json.dumps({"n": number, "pad": "%s %d" * 3}))
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["access-r1.log", *(f"access-r1.log.{n}" for n in (1, 2, 3))]
    assert json.loads((tmp_path / "access-r1.log").read_text().splitlines()[-1])["n"] == 999
