"""`tandem audit` against a server that answers as a service does."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.client import IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from app import audit, drain

ENGINES = {"prefill": "p-1", "decode": "d-1"}


class Handler(BaseHTTPRequestHandler):
    """Answers of two tokens whose logprobs deviate by ``pair`` from the score, or alone by 1e-2."""

    pair: float = 0.0
    received: bool | None = True
    route = "remote"
    status = 200
    salts: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "m"}]}, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        alone = "prompt_logprobs" in body
        choice: dict[str, Any] = {"prompt_token_ids": [7, 8, 9], "token_ids": [4, 5]}
        off = 1e-2 if alone else self.pair
        choice["logprobs"] = {"token_logprobs": [-1.0 - off, -2.0]}
        scored = [None, *({str(token): {"logprob": -0.5}} for token in (8, 9))]
        if isinstance(body["prompt"], list):
            assert body["prompt"] == [7, 8, 9, 4, 5]
            scored += [{"4": {"logprob": -1.0}, "6": {"logprob": 0.0}}, {"5": {"logprob": -2.0}}]
        choice["prompt_logprobs"] = scored if alone else None
        if not alone:
            self.salts.append(body["cache_salt"])
        decision = {"served": ENGINES | {"received_kv": self.received}}
        headers = {"x-tandem-route": "local" if alone else self.route, "x-tandem-decision": json.dumps(decision)}
        self.reply({"choices": [choice]}, headers)

    def reply(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        self.send_response(self.status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("behaviour", "status", "said"),
    [
        ({"pair": 2e-2}, 0, "ok    prefill p-1 -> decode d-1: 0 of 3"),
        ({"pair": 4e-2}, 1, "WRONG prefill p-1 -> decode d-1: 3 of 3 answers above it, worst 2.0e-02"),
        ({"route": "local"}, 2, "routed to a prefill-decode pair"),
        ({"status": 429}, 2, "HTTP 429"),
        ({"received": False}, 2, "without received KV: 3"),
        ({"received": None}, 2, "without received KV: 3"),
    ],
    ids=str,
)
def test_a_pair_that_deviates_more_than_decode_alone_is_named(
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    behaviour: dict[str, Any],
    status: int,
    said: str,
) -> None:
    for name, value in behaviour.items():
        monkeypatch.setattr(Handler, name, value)
    assert audit.main(["--url", url, "--count", "3"]) == status
    assert len(set(Handler.salts)) == len(Handler.salts), "no answer uses KV of an earlier one"
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


@pytest.mark.parametrize("tokens", ["1", "0"])
def test_an_answer_that_prefill_may_give_alone_is_refused(
    url: str, capsys: pytest.CaptureFixture[str], tokens: str
) -> None:
    """With `first_token: prefill`, decode would receive no KV for an answer of one token."""
    with pytest.raises(SystemExit, match="2"):
        audit.main(["--url", url, "--count", "3", "--tokens", tokens])
    assert "--tokens must be at least 2" in capsys.readouterr().err


@pytest.mark.parametrize("command", [audit.main, lambda options: drain.main(["engine", *options])])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), IncompleteRead(b"")])
def test_a_command_that_ends_early_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: Any, error: BaseException
) -> None:
    def ends(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", ends)
    assert command(["--url", "http://127.0.0.1:1"]) > 0
    said = capsys.readouterr().err
    assert ("interrupted" if isinstance(error, KeyboardInterrupt) else "IncompleteRead") in said


@pytest.mark.parametrize("command", [audit.main, lambda options: drain.main(["engine", *options])])
def test_an_invalid_url_is_named(capsys: pytest.CaptureFixture[str], command: Any) -> None:
    assert command(["--url", "service:8000"]) > 0
    assert "unknown url type" in capsys.readouterr().err
