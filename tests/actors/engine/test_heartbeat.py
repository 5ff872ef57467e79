"""An engine's heartbeats: their receivers, and the conditions that stop them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine import vllm_engine
from actors.engine.asgi_call import Notices, call_asgi
from actors.engine.heartbeat import HeartbeatMonitor
from actors.engine.vllm_engine import StopFlag, VllmEngine
from actors.errors import EngineDownError
from actors.replay_log import SERVED_CALL
from actors.request import Call, Heartbeat, ResponseStart


async def test_every_answer_is_heard_by_all_who_wait() -> None:
    """Every open call receives the beat, and closed ones do not; without calls nothing runs."""
    asked = asyncio.Semaphore(0)
    go = asyncio.Semaphore(0)

    async def ask() -> bool:
        asked.release()
        await go.acquire()
        return False

    heartbeats = HeartbeatMonitor(ask, every_s=0.001)
    heard: list[str] = []
    with heartbeats.subscribed(lambda: heard.append("a")):
        with heartbeats.subscribed(lambda: heard.append("b")):
            await asked.acquire()
            assert heard == [], "a core that has not answered is not alive"
            go.release()
            await asked.acquire()
            assert sorted(heard) == ["a", "b"]
        go.release()
        await asked.acquire()
        assert sorted(heard) == ["a", "a", "b"]
    go.release()
    while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - the monitor has no event for it
        await asyncio.sleep(0)
    assert sorted(heard) == ["a", "a", "b"]


async def test_an_engine_whose_core_answers_nothing_is_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine stays unhealthy after its calls have ended: routers cancel them long before Serve
    replaces it.
    """
    asked, answer = asyncio.Event(), asyncio.Event()

    async def ping(_: int) -> None:
        asked.set()
        await answer.wait()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(vllm_engine, "HeartbeatMonitor", partial(HeartbeatMonitor, every_s=0.001))
    llm: Any = SimpleNamespace(errored=False, ping_rank=ping)
    engine = VllmEngine(llm, app, StopFlag(), AsyncExitStack(), None, None, "", hung_s=0.1)
    async with aclosing(engine.serve(Call("GET", "/"))) as call:
        serving = asyncio.ensure_future(anext(call))
        await asked.wait()
        serving.cancel()
        await asyncio.wait({serving})
    await asyncio.sleep(0.2)
    with pytest.raises(EngineDownError, match="has not answered"):
        await engine.check_health()
    answer.set()
    async with asyncio.timeout(10):
        while len(asyncio.all_tasks()) > 1:  # noqa: ASYNC110 - the monitor has no event for it
            await asyncio.sleep(0.001)
    await engine.check_health()


async def test_a_question_that_fails_is_asked_again() -> None:
    answers: list[bool | Exception] = [RuntimeError("busy dying"), True]
    beat = asyncio.Event()

    async def ask() -> bool:
        answer = answers.pop(0) if answers else True
        if isinstance(answer, Exception):
            assert not beat.is_set()
            raise answer
        return answer

    with HeartbeatMonitor(ask, every_s=0.001).subscribed(beat.set):
        async with asyncio.timeout(10):
            await beat.wait()
    assert len(answers) == 0


@pytest.mark.parametrize("begun", [False, True], ids=["before its start", "within its body"])
async def test_a_call_says_that_its_engine_lives(begun: bool) -> None:
    """A call yields heartbeats before its start and within its body; the body is unchanged."""
    go = asyncio.Event()

    async def app(scope, receive, send) -> None:
        if begun:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"some", "more_body": True})
        await go.wait()
        if not begun:
            await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"more"})

    async def ask() -> None:
        pass

    items: list[Any] = []
    notices = Notices()
    with HeartbeatMonitor(ask, every_s=0.001).subscribed(notices.beat):
        async with aclosing(call_asgi(app, Call("GET", "/"), notices=notices)) as answer:
            async for item in answer:
                items.append(item)
                if items.count(Heartbeat()) == 3:
                    go.set()
    assert items.count(Heartbeat()) >= 3
    start, *body = [item for item in items if item != Heartbeat()]
    assert start == ResponseStart(200, ())
    assert b"".join(body) == (b"somemore" if begun else b"more")
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_the_first_token_of_an_answer_is_reported_at_once() -> None:
    """The engine reports the first token once, before the answer, without a call to the core."""
    go = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        served = SERVED_CALL.get()
        assert served is not None
        served.sampled_first()
        served.sampled_first()
        await go.wait()
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"{}"})

    async def ping(_: int) -> None:
        await asyncio.sleep(60)

    llm: Any = SimpleNamespace(errored=False, ping_rank=ping)
    engine = VllmEngine(llm, app, StopFlag(), AsyncExitStack(), None, None, "")
    items: list[Any] = []
    async with asyncio.timeout(30), aclosing(engine.serve(Call("GET", "/"))) as call:
        async for item in call:
            items.append(item)
            go.set()
    assert items == [Heartbeat(tokens=True), ResponseStart(200, ()), b"{}"]
