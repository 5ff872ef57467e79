"""A call to all replicas of a role at once; failures of some do not affect the others' results."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
from ray.exceptions import RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentBroadcastResponse, DeploymentHandle

from actors.broadcast import ask_all
from tests.actors.fleet import Reply, broadcast

BOUND_S = 0.3
NO_ACTOR = DeploymentUnavailableError(DeploymentID("Decode", "tandem"))


class Replicas:
    """A handle whose broadcasts are `sent`."""

    def __init__(self, sent: Callable[[], DeploymentBroadcastResponse]) -> None:
        self._sent = sent

    def broadcast(self, method: str, *_: object) -> DeploymentBroadcastResponse:
        return self._sent()


async def ask(sent: Callable[[], DeploymentBroadcastResponse], bound_s: float = BOUND_S) -> list[Any]:
    return await ask_all("decode", cast(DeploymentHandle, Replicas(sent)), "ping", bound_s)


@contextmanager
def another_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Event loop in its own thread, like Serve's in an actor."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    "bad",
    [Reply("late", 60), Reply(RuntimeError("anything")), Reply(asyncio.CancelledError())],
    ids=["late", "fails", "cancelled"],
)
async def test_one_that_is_late_or_fails_costs_only_its_own_reply(bad: Reply) -> None:
    """The wait has a deadline. Serve may report that a call was cancelled."""
    began_at = time.monotonic()
    assert await ask(lambda: broadcast(Reply("p"), bad, Reply("r"))) == ["p", "r"]
    assert time.monotonic() - began_at < 10 * BOUND_S


async def test_replies_are_found_through_serves_own_loop() -> None:
    """Coroutines sent to the loop are awaited there."""
    with another_loop() as loop:
        assert await ask(lambda: broadcast(Reply("p"), loop=loop), 60) == ["p"]
        assert await ask(lambda: broadcast(Reply("q", 60), loop=loop)) == []


@pytest.mark.usefixtures("virtual_time")
@pytest.mark.parametrize(
    "problem",
    [NO_ACTOR, RuntimeError("Router is not initialized"), RayTaskError("ping", "", ValueError("anything"))],
    ids=lambda problem: type(problem).__name__,
)
async def test_nobody_can_be_asked(problem: Exception) -> None:
    assert await ask(lambda: broadcast(problem=problem)) == []

    def sent() -> DeploymentBroadcastResponse:
        raise problem

    assert await ask(sent) == []


@pytest.mark.usefixtures("virtual_time")
async def test_serve_that_does_not_learn_who_runs() -> None:
    """The caller does not wait for Serve."""

    async def never() -> list[Any]:
        await asyncio.sleep(60)
        return []

    assert await asyncio.wait_for(ask(lambda: DeploymentBroadcastResponse(never(), None)), 10 * BOUND_S) == []


@pytest.mark.usefixtures("virtual_time")
async def test_whoever_asks_can_be_cancelled() -> None:
    asking = asyncio.create_task(ask(lambda: broadcast(Reply("p", 60), Reply("q", 60))))
    await asyncio.sleep(BOUND_S / 3)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_a_role_without_replicas_is_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`/health` calls repeatedly while the engines start."""
    monkeypatch.setattr("actors.broadcast._logged_at", {})

    def sent() -> DeploymentBroadcastResponse:
        raise NO_ACTOR

    for _ in range(3):
        assert asyncio.run(ask(sent)) == []
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["ping"]
