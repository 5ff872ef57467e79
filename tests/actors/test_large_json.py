"""Large bodies do not block the event loop of a router or an engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from actors import large_json
from actors.errors import UnavailableError
from actors.large_json import OFF_LOOP_BYTES, loads
from actors.policy.prompts import read_prompt
from actors.router import client_request
from actors.router.client_request import ClientRequest
from app.http.errors import MalformedError
from app.http.parsing import parse_body, read_request
from configs.settings.router import RouterLimits

BODY_BYTES = 16 * 2**20
TICKS = 15
"""A thread that keeps the interpreter's lock lets another coroutine run at most a few times."""


def http(body: bytes) -> Request:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return messages.pop()

    return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b""}, receive)


async def ticks_during(work: Awaitable[Any]) -> tuple[Any, int]:
    """Return the result of `work`, and how often another coroutine ran meanwhile."""
    task, ticks = asyncio.ensure_future(work), 0
    while not task.done():
        await asyncio.sleep(0.001)
        ticks += 1
    return task.result(), ticks


@pytest.fixture
def engine_side() -> Iterator[None]:
    """Starlette as in an engine's process."""
    kept = Request.json
    large_json.decode_large_bodies_off_loop()
    yield
    Request.json = kept  # type: ignore[method-assign]


def token_ids() -> bytes:
    one = b"12345, "
    return b'{"prompt": [' + one * (BODY_BYTES // len(one)) + b"1]}"


async def test_a_router_serves_others_while_it_reads_a_large_body() -> None:
    async def read() -> Any:
        return await read_request(http(token_ids()), "/v1/completions", RouterLimits(max_body_bytes=2 * BODY_BYTES))

    found, ticks = await ticks_during(read())
    assert found.body["prompt"][-2:] == [12345, 1]
    assert "prompt" in vars(found)
    assert ticks >= TICKS


async def test_a_router_whose_threads_are_busy_refuses_a_large_body() -> None:
    """After `body_timeout_s`, not when a thread is free."""
    release, loop = threading.Event(), asyncio.get_running_loop()
    threads = ThreadPoolExecutor(1)
    loop.set_default_executor(threads)
    threads.submit(release.wait, 60)
    try:
        limits = RouterLimits(max_body_bytes=2 * BODY_BYTES, body_timeout_s=0.05)
        with pytest.raises(UnavailableError, match="it is busy"):
            await read_request(http(token_ids()), "/v1/completions", limits)
    finally:
        release.set()


@pytest.mark.usefixtures("engine_side")
async def test_an_engine_serves_others_while_it_reads_a_large_body() -> None:
    found, ticks = await ticks_during(http(token_ids()).json())
    assert found["prompt"][-2:] == [12345, 1]
    assert ticks >= TICKS


@pytest.mark.usefixtures("engine_side")
@pytest.mark.parametrize("size", [10, OFF_LOOP_BYTES])
async def test_both_ways_decode_the_same(size: int) -> None:
    body = {"text": "é" * size, "numbers": [1, -2, 1.5e3, 2**80, float("inf")], "nested": {"one": [None, True]}}
    raw = json.dumps(body).encode()
    assert loads(raw) == await http(raw).json() == body


@pytest.mark.parametrize("end", [b"", b"]", b"9" * 5000 + b"]}"])
def test_a_large_malformed_body_has_the_error_of_a_small_one(end: bytes) -> None:
    with pytest.raises(MalformedError, match=r"(valid|as) JSON"):
        parse_body(b'{"prompt": [' + b"1, " * OFF_LOOP_BYTES + end)


async def test_small_requests_do_not_wait_for_a_large_one_to_be_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until Python 3.12 a `cached_property` computes under one lock of all instances."""
    began, may_end = threading.Event(), threading.Event()

    def slow(body: Any) -> Any:
        if len(body["prompt"]) > OFF_LOOP_BYTES:
            began.set()
            assert may_end.wait(30)
        return read_prompt(body)

    monkeypatch.setattr(client_request, "read_prompt", slow)
    large = ClientRequest("/v1/completions", (), b"x" * (OFF_LOOP_BYTES + 1), {"prompt": "x" * (OFF_LOOP_BYTES + 1)})
    small = ClientRequest("/v1/completions", (), b"{}", {"prompt": "short"})
    preparing = asyncio.create_task(large.prepare())
    await asyncio.to_thread(began.wait, 30)
    found = await asyncio.wait_for(asyncio.to_thread(lambda: small.prompt), 10)
    may_end.set()
    await preparing
    assert found.answers == 1
