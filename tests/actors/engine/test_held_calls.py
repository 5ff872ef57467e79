"""A prefill replica holds the call of a prompt that it has computed, and no other."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.engine import engine_actor
from actors.engine.asgi_call import Notices
from actors.engine.engine_actor import Prefill
from actors.request import Call, FirstTokenChunk, ResponseStart
from actors.rpc.messages import RpcRequest
from actors.rpc.server import HANDED_BACK
from actors.rpc.server_connection import ServedStream, ServerConnection

JSON = ((b"content-type", b"application/json"),)
EVENTS = ((b"content-type", b"text/event-stream"),)
TOKEN = FirstTokenChunk(b"data: {}\n\n", ((1,),), None, 9)


class NoEngine:
    def __init__(self) -> None:
        self.discarded: list[str] = []
        self.waiting: deque[int] = deque()

    def take_waiting(self, rank: int) -> int:
        return self.waiting.popleft() if self.waiting else 0

    async def discard(self, transfer_id: str, rank: int) -> None:
        self.discarded.append(transfer_id)


class Replica(Prefill):
    """A prefill replica without an engine."""

    def __init__(self, items: list[Any]) -> None:
        self._held = set()
        self._computing = [{}]
        self._items = items
        self.engine: Any = NoEngine()

    async def call(self, rank: int, call: Call, notices: Notices | None = None) -> AsyncGenerator[Any, None]:
        """Yield the items; without any, the notices: the prompt waits."""
        for item in self._items:
            yield item
        while not self._items and notices is not None:
            yield await notices.get()

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
@pytest.mark.parametrize("done", [False, True])
async def test_a_call_is_held_if_its_prompt_was_computed(items: list[Any], held: bool, done: bool):
    """Its KV is discarded unless decode has it."""
    replica = Replica(items)
    request = RpcRequest(Call("POST", "/v1/completions"), "r", 0, transfer_id="t", hold_s=3600.0)
    stream = ServedStream(cast(ServerConnection, None), 1, expects_refusal=False)
    call = replica.serve_request(0, request, stream)
    assert [await anext(call) for _ in items] == items
    rest = asyncio.ensure_future(anext(call, None))
    for _ in range(10):
        await asyncio.sleep(0)
    assert rest.done() != held
    stream.done = stream.done or done
    rest.cancel()
    await asyncio.wait({rest})
    await call.aclose()
    assert not replica._held  # noqa: SLF001
    assert replica.engine.discarded == ([] if held and done else ["t"])


async def test_an_engine_without_new_calls_hands_back_the_prompts_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM begins prompts in order of arrival. Computed prompts stay until decode has their KV.

    A step's count may include the prompts that were handed back during it.
    """
    monkeypatch.setattr(engine_actor, "LOOK_S", 0.0)
    waiting, computed = Replica([]), Replica([ResponseStart(200, JSON), b"{}"])
    computed._computing = waiting._computing  # noqa: SLF001
    server: Any = SimpleNamespace(refuses=asyncio.Event())
    calls = []
    for number, replica in enumerate((waiting, computed, waiting, waiting, computed)):
        request = RpcRequest(Call("POST", "/v1/completions"), "r", 0, transfer_id=str(number), hold_s=3600.0)
        stream = ServedStream(cast(ServerConnection, None), 1, expects_refusal=False)
        call = replica.serve_request(0, request, stream)
        calls.append((call, asyncio.ensure_future(_rest(call))))
    await asyncio.sleep(0)
    emptying = asyncio.create_task(waiting._empty(0, server))  # noqa: SLF001
    ended: list[str] = []
    for refuses, counts, more in ((False, [2], []), (True, [2, 1], ["2", "3"]), (True, [1], ["0"]), (True, [9], [])):
        if refuses:
            server.refuses.set()
        waiting.engine.waiting = deque(counts)
        for _ in range(20):
            await asyncio.sleep(0)
        ended += more
        assert sorted(str(number) for number, (_, rest) in enumerate(calls) if rest.done()) == sorted(ended)
        assert sorted(waiting.engine.discarded) == sorted(ended)
    assert all(rest.result() is HANDED_BACK for _, rest in calls if rest.done())
    for task in (emptying, *(rest for _, rest in calls)):
        task.cancel()
    await asyncio.gather(emptying, *(rest for _, rest in calls), return_exceptions=True)


async def _rest(call: AsyncGenerator[Any, None]) -> Any:
    """Return the last item."""
    last = None
    async for item in call:
        last = item
    return last
