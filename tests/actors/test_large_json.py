"""Large bodies do not block an event loop; kept fields of all bodies stay as they were written."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from actors import large_json
from actors.errors import UnavailableError
from actors.large_json import OFF_LOOP_BYTES, as_written, loads, write
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


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def test_values_are_passed_on_as_they_were_written() -> None:
    """No digit or escape of a kept field changes; set fields are set, and removed ones are
    absent.
    """
    raw = rb'{"prompt" : "\u00e4\n\/",  "temperature":0.10, "seed": 1e2, "n":1,"stop":[ "x" ]}'
    fields = as_written(raw)
    del fields["stop"]
    assert write(fields | {"n": 2, "x": {"transfer_id": "t"}}) == (
        rb'{"prompt":"\u00e4\n\/","temperature":0.10,"seed":1e2,"n":2,"x":{"transfer_id":"t"}}'
    )


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": NaN, "b": -Infinity}',
        rb'{"a": "\ud800", "b": 1}',
        rb'{"\ud800": 1, "b": 2}',
        b'{"a": "\xed\xa0\x80"}',
        b'{"\xed\xa0\x80": 1, "b": 2}',
        b'{"a": 1, "a": 2}',
        b'{"a": 123456789012345678901234567890, "b": 1e999}',
        '{"a": "ä"}'.encode("utf-16"),
        '{"a": "ä"}'.encode("utf-32"),
        b'\xef\xbb\xbf{"a": 1}',
        b' \n{ "a" :\t{ "b" : [ 1 , { } ] } } ',
        b"{}",
    ],
    ids=["NaN", "half", "name", "bytes", "name bytes", "twice", "big", "16", "32", "mark", "spaces", "empty"],
)
def test_engines_read_what_the_router_reads(raw: bytes) -> None:
    """Any JSON that Python accepts, as engines' servers do, has the same meaning after the
    router.
    """
    body = json.loads(raw)
    seen = json.loads(write(as_written(raw) | {"set": True}))
    assert repr(seen) == repr({**body, "set": True})  # NaN is not equal to itself


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=6), st.booleans())
def test_any_object_comes_out_as_it_went_in(body: dict[str, object], ascii_only: bool) -> None:
    """Objects with any names and values, with and without escapes, stay unchanged."""
    raw = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert json.loads(write(as_written(raw))) == body
