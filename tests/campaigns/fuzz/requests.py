"""Hostile HTTP requests from a seed: bodies by vLLM's own schema, and invalid HTTP."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from actors.request import Endpoint

MODEL = "tandem-demo"
COMPLETIONS: Endpoint = "/v1/completions"
CHAT: Endpoint = "/v1/chat/completions"
JSON_TYPE = {"content-type": "application/json"}

NUMBERS = (None, True, False, -1, 0, 1, 2, 129, 2**31, 2**63, 10**400, -0.0, 1e308, float("nan"), float("inf"))
TEXTS = ("", "\x00", "\ud800", "é" * 50, "x" * 5000)
TREES: tuple[Any, ...] = ([], {}, [None], [[[[[]]]]], {"": {"": {}}}, [0] * 300, ["a"] * 200, {"a": 1, "b": [1, 2]})
ODD: tuple[Any, ...] = (*NUMBERS, *TEXTS, *TREES, {"type": "json_object"}, {"type": "x" * 100})

RECALL = "mira=427\nkelo=093\nkelo?"
PROMPT_TEXTS = (RECALL, "", "a", "mira=427\n" * 60, "é\u202e\x00\U0001d518" * 20)
PROMPT_LISTS: tuple[Any, ...] = (
    [5, 6, 7],
    [],
    [[5, 6], [7, 8]],
    ["a", "b"],
    ["a", [1]],
    [0],
    [-1, 2],
    [10**9, 1],
    [1.5, 2],
)
PROMPTS: tuple[Any, ...] = (*PROMPT_TEXTS, *PROMPT_LISTS, [True, False], ["x"] * 200, [None], {"a": 1})
PARTS: tuple[Any, ...] = (
    {"type": "text", "text": RECALL},
    {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}},
    {"type": "input_audio", "input_audio": {"data": "!", "format": "wav"}},
    {"type": "?"},
)
BROKEN_CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
MESSAGES: tuple[Any, ...] = (
    [{"role": "user", "content": RECALL}],
    *([{"role": "user", "content": [part]}] for part in PARTS),
    [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": None}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": "\x00", "content": {}}],
    [{"role": "user"}],
    [{"content": "x"}],
    [{"role": "assistant", "tool_calls": [BROKEN_CALL]}],
    *([[]], [], "hi", None),
)
PATHS = (
    *("/", "/%00", "/V1/completions", "/docs", "/health", "/metrics", "/v1/", "/v1/completions/", "/v1/embeddings"),
    *("/v1/completions?x=" + "y" * 3000, "/v1/models", "/v1/models/..%2f..%2fetc", "/v1/responses"),
)


@dataclass(frozen=True)
class Case:
    """One request. ``raw`` is sent over a socket unchanged, and the other fields are ignored."""

    name: str
    method: str = "POST"
    path: str = COMPLETIONS
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=lambda: dict(JSON_TYPE))
    raw: bytes | None = None
    leaves_after_s: float | None = None


@cache
def fields(path: str) -> dict[str, dict[str, Any]]:
    """Return the properties of a request's body in the schema that vLLM publishes."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest

    model = CompletionRequest if path == COMPLETIONS else ChatCompletionRequest
    return dict(model.model_json_schema()["properties"])


class Requests:
    """Source of random cases."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"requests {seed}")

    def case(self) -> Case:
        others = (self._broken_json, self._other_route, self._headers, self._not_http, self._leaves)
        return self.rng.choice((self._by_schema,) * 6 + others)()

    def _by_schema(self) -> Case:
        path = self.rng.choice((COMPLETIONS, CHAT))
        body = self._body(path)
        for _ in range(self.rng.choice((0, 1, 1, 2, 5))):
            name, schema = self.rng.choice(list(fields(path).items()))
            body[name] = self._value(schema)
        return Case("by schema", path=path, content=dumped(body))

    def _body(self, path: str) -> dict[str, Any]:
        rng = self.rng
        first = {"prompt": rng.choice(PROMPTS)} if path == COMPLETIONS else {"messages": rng.choice(MESSAGES)}
        body = {"model": MODEL, "max_tokens": 4, **first}
        if rng.random() < 0.3:
            body["stream"] = True
        if rng.random() < 0.2:
            body["n"] = rng.choice((0, 2, 4, 10**6, -3, "2"))
        return body

    def _value(self, schema: dict[str, Any]) -> Any:
        """Return a value of the schema's type, or of any other."""
        rng = self.rng
        if rng.random() < 0.4:
            return rng.choice(ODD)
        options = schema.get("anyOf") or [schema]
        chosen = rng.choice(options)
        if "enum" in chosen:
            return rng.choice(chosen["enum"])
        match chosen.get("type"):
            case "integer":
                return rng.choice((-5, 0, 1, 3, 20, 2**31, 2**64))
            case "number":
                return rng.choice((-2.0, 0.0, 0.5, 1.0, 7.5, 1e30))
            case "boolean":
                return rng.random() < 0.5
            case "string":
                return rng.choice(("", "a", "auto", "none", "[a-z]+(", "x" * 1000))
            case "array":
                return [self._value(chosen.get("items") or {}) for _ in range(rng.choice((0, 1, 2, 40)))]
            case "object":
                return {rng.choice(("a", "5", "type", "")): rng.choice(ODD) for _ in range(rng.choice((0, 1, 3)))}
        return rng.choice(ODD)

    def _broken_json(self) -> Case:
        rng = self.rng
        whole = dumped(self._body(COMPLETIONS))
        content = rng.choice(
            (
                whole[: rng.randrange(len(whole))],
                whole + b"}",
                b"[" * rng.randrange(1, 200_000),
                b'{"a":' * 5000 + b"1" + b"}" * 5000,
                b"\xff\xfe" + whole,
                whole.replace(b"tandem", b"\xc3\x28"),
                b'{"model": "tandem-demo", "model": 3, "prompt": "a", "prompt": ["b"], "max_tokens": 2}',
                b'{"model": "tandem-demo", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
                rng.randbytes(rng.choice((1, 100, 100_000))),
                b"x" * (9 * 2**20),
                b"",
            )
        )
        return Case("broken JSON", path=rng.choice((COMPLETIONS, CHAT)), content=content)

    def _other_route(self) -> Case:
        rng = self.rng
        path = rng.choice(PATHS)
        method = rng.choice(("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW"))
        return Case("other routes", method, path, dumped(self._body(COMPLETIONS)))

    def _headers(self) -> Case:
        rng = self.rng
        name, value = rng.choice(
            (
                ("content-type", "text/plain"),
                ("content-type", "multipart/form-data; boundary=x"),
                ("content-type", "application/json; charset=utf-16"),
                ("content-encoding", "gzip"),
                ("x-request-id", "r" * 5000),
                ("x-request-id", "é \t ; drop"),
                ("traceparent", "00-zz-zz-zz"),
                ("tracestate", "a=" * 300),
                ("accept", "text/event-stream"),
                ("authorization", "Bearer " + "k" * 3000),
                ("x-data-parallel-rank", "99"),
                ("content-length", "abc"),
            )
        )
        return Case("headers", content=dumped(self._body(COMPLETIONS)), headers=JSON_TYPE | {name: value})

    def _not_http(self) -> Case:
        rng = self.rng
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        raw = rng.choice(
            (
                b"",
                b"\x16\x03\x01\x02\x00" + bytes(100),
                b"GET / HTTP/9.9\r\n\r\n",
                head,
                head + b"Content-Length: 100\r\n\r\n{",
                head + b"Content-Length: -5\r\n\r\n{}",
                head + b"Content-Length: 99999999999999999999\r\n\r\n{}",
                head + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
                head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
                head + b"Transfer-Encoding: chunked\r\n\r\nffffffffffff\r\n{",
                head + b"X: " + b"y" * 200_000 + b"\r\n\r\n",
                head + b"X: y\r\n" * 5000 + b"\r\n",
                rng.randbytes(2000),
            )
        )
        return Case("no HTTP", raw=raw)

    def _leaves(self) -> Case:
        """A valid request whose client disconnects."""
        rng = self.rng
        body = {"model": MODEL, "prompt": "mira=427\n" * 60, "max_tokens": 200, "ignore_eos": True}
        body["stream"] = rng.random() < 0.5
        return Case("leaves", content=dumped(body), leaves_after_s=rng.uniform(0.001, 0.3))


def dumped(body: Any) -> bytes:
    """Encode as JSON; NaN and lone surrogates, extensions of Python's, are sent unchanged."""
    return json.dumps(body).encode(errors="replace")
