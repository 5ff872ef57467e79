"""Calls that a prefill engine holds until decode has their KV, or hands back."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.engine import engine_actor
from actors.request import Call, ResponseStart
from actors.rpc.messages import RpcRequest
from actors.rpc.server import HANDED_BACK
from actors.rpc.server_connection import ServedStream, ServerConnection
from tests.actors.behaviours import EVENTS, JSON
from tests.actors.engine.test_split_call import FIRST, PrefillEngine, sends, waits


def held_call(engine: PrefillEngine, number: str) -> tuple[ServedStream, AsyncGenerator[Any, None]]:
    request = RpcRequest(Call("POST", "/v1/completions"), "r", 0, transfer_id=number, hold_s=3600.0)
    stream = ServedStream(cast(ServerConnection, None), 1, expects_refusal=False)
    return stream, engine.serve_request(0, request, stream)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("items", "held"),
    [
        ([ResponseStart(200, JSON), b"{}"], True),
        ([ResponseStart(400, JSON), b"{}"], False),
        ([ResponseStart(200, EVENTS), FIRST], True),
        ([ResponseStart(200, EVENTS), b'data: {"error": {}}\n\n', b"data: [DONE]\n\n"], False),
    ],
)
@pytest.mark.parametrize("done", [False, True])
async def test_a_call_is_held_if_its_prompt_was_computed(items: list[Any], held: bool, done: bool) -> None:
    """Its KV is discarded unless decode has it."""
    engine = PrefillEngine(sends(*items))
    stream, call = held_call(engine, "t")
    assert [await anext(call) for _ in range(1 + len(items))][1:] == items
    rest = asyncio.ensure_future(anext(call, None))
    await turns()
    assert rest.done() != held
    stream.done = stream.done or done
    rest.cancel()
    await asyncio.wait({rest})
    await call.aclose()
    assert not engine._held  # noqa: SLF001
    assert engine.engine.discarded == ([] if held and done else ["t"])


async def test_an_engine_without_new_calls_hands_back_the_prompts_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM begins prompts in order of arrival. Computed prompts stay until decode has their KV.

    A step's count may include the prompts that were handed back during it.
    """
    monkeypatch.setattr(engine_actor, "LOOK_S", 0.0)
    waiting, computed = PrefillEngine(waits), PrefillEngine(sends(ResponseStart(200, JSON), b"{}"))
    computed._computing = waiting._computing  # noqa: SLF001
    server: Any = SimpleNamespace(refuses=asyncio.Event())

    async def last_item(call: AsyncGenerator[Any, None]) -> Any:
        return [item async for item in call][-1]

    engines = enumerate((waiting, computed, waiting, waiting, computed))
    rests = [asyncio.ensure_future(last_item(held_call(engine, str(number))[1])) for number, engine in engines]
    await asyncio.sleep(0)
    emptying = asyncio.create_task(waiting._empty(0, server))  # noqa: SLF001
    ended: list[str] = []
    for refuses, counts, more in ((False, [2], []), (True, [2, 1], ["2", "3"]), (True, [1], ["0"]), (True, [9], [])):
        if refuses:
            server.refuses.set()
        waiting.engine.waiting = deque(counts)
        await turns()
        await turns()
        ended += more
        assert sorted(str(number) for number, rest in enumerate(rests) if rest.done()) == sorted(ended)
        assert sorted(waiting.engine.discarded) == sorted(ended)
    assert all(rest.result() is HANDED_BACK for rest in rests if rest.done())
    for task in (emptying, *rests):
        task.cancel()
    await asyncio.gather(emptying, *rests, return_exceptions=True)
