"""A prefill replica holds the call of a prompt that it has computed, and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from actors.engine.prefill import Prefill
from actors.request import Call, FirstTokenChunk, ResponseStart
from actors.rpc.messages import RpcRequest

JSON = ((b"content-type", b"application/json"),)
EVENTS = ((b"content-type", b"text/event-stream"),)
TOKEN = FirstTokenChunk(b"data: {}\n\n", ((1,),), None, 9)


class Replica(Prefill):
    """A prefill replica without an engine."""

    def __init__(self, items: list[Any]) -> None:
        self._held = set()
        self._items = items

    async def call(self, rank: int, call: Call) -> AsyncGenerator[Any, None]:
        for item in self._items:
            yield item

    def __del__(self) -> None:  # type: ignore[override]
        """Replace Serve's hook."""


@pytest.mark.parametrize(
    ("items", "held"),
    [
        ([ResponseStart(200, JSON), b"{}"], True),
        ([ResponseStart(400, JSON), b"{}"], False),
        ([ResponseStart(200, EVENTS), TOKEN], True),
        ([ResponseStart(200, EVENTS), b'data: {"error": {}}\n\n', b"data: [DONE]\n\n"], False),
    ],
)
async def test_a_call_is_held_if_its_prompt_was_computed(items: list[Any], held: bool):
    replica = Replica(items)
    request = RpcRequest(Call("POST", "/v1/completions"), "r", 0, transfer_id="t", hold_s=3600.0)
    call = replica.serve_request(0, request)
    assert [await anext(call) for _ in items] == items
    rest = asyncio.ensure_future(anext(call, None))
    for _ in range(10):
        await asyncio.sleep(0)
    assert rest.done() != held
    rest.cancel()
    await asyncio.wait({rest})
    await call.aclose()
    assert not replica._held  # noqa: SLF001
