"""An HTTP request is cancelled, or its client disconnects, at each suspension of any of its tasks.

The whole HTTP side runs, with key, admission and body, and every wait of every task counts: the
legs' tasks, decode's start, the reader of the client's messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from functools import partial
from typing import Any

import pytest

from actors.request import Call, Heartbeat, ResponseStart
from actors.router.router import Router
from app.http.auth import Authenticated, digest
from app.http.routes import build_http
from testing.prometheus import value_of
from tests.actors.behaviours import (
    JSON,
    LIMITS,
    OK,
    answers,
    cut_off,
    dies,
    engine,
    fleet,
    hangs,
    request,
    transfers,
    well,
)
from tests.actors.fleet import Handle, at_rest
from tests.app.http.servers import KEY, Client

pytestmark = pytest.mark.usefixtures("virtual_time")


def short(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """A stream of a few large groups: enough waits, not hundreds."""
    return engine(2, [14])(call, turn)


async def slow_to_answer(call: Call, _: int) -> AsyncGenerator[Any, None]:
    """A decode engine that has its KV, and computes."""
    await asyncio.sleep(0.01)
    yield ResponseStart(200, JSON)
    await asyncio.sleep(0.01)
    yield b"{}"


async def slow_after_its_first_token(call: Call, turn: int) -> AsyncGenerator[Any, None]:
    """A decode engine that reports the first token of an answer."""
    yield Heartbeat(tokens=True)
    async for item in slow_to_answer(call, turn):
        yield item


STORIES: dict[str, tuple[list[Any], list[Any], dict[str, Any]]] = {
    "an answer": ([well], [slow_to_answer], {"stream": False}),
    "an answer whose first token is reported": ([well], [slow_after_its_first_token], {"stream": False}),
    "a stream": ([well], [short], {}),
    "decode alone": ([], [short], {}),
    "n of 2": ([well], [short], {"n": 2}),
    "echo": ([well], [short], {"echo": True}),
    "echo, not streamed": ([well], [OK], {"stream": False, "echo": True}),
    "decode refuses": ([well], [answers(400, {}, 0.01)], {}),
    "a prefill leg dies": ([dies, well], [short, short], {}),
    "a prefill leg is late": ([hangs, well], [OK], {"stream": False}),
    "no prefill leg lives": ([dies, dies], [OK], {"stream": False}),
    "decode dies before": ([well], [dies, OK], {"stream": False}),
    "decode dies within": ([well], [cut_off, OK], {"stream": False}),
    "decode dies in mid-stream": ([well], [engine(1, [14], 20), short], {}),
}
"""Prefill's and decode's behaviours, and the request.

The test creates it, because its deadline starts then.
"""


class Suspensions:
    """Task factory that counts the waits of all tasks of a loop, and calls `act` at the n-th."""

    def __init__(self, n: int = 0, act: Callable[[], object] = lambda: None) -> None:
        self.waits = 0
        self._n = n
        self._act = act

    def __call__(self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
        """Create a task; the loop calls this as its task factory."""
        return asyncio.Task(_Counted(work, self), loop=loop, **options)

    def one_more(self) -> None:
        self.waits += 1
        if self.waits == self._n:
            self._act()


class _Counted(Coroutine[Any, Any, Any]):
    """A task's coroutine that reports its waits."""

    def __init__(self, work: Coroutine[Any, Any, Any], suspensions: Suspensions) -> None:
        self._work = work
        self._suspensions = suspensions

    def send(self, value: Any) -> Any:
        return self._waits(self._work.send(value))

    def throw(self, *error: Any) -> Any:
        return self._waits(self._work.throw(*error))

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    def _waits(self, waited_for: Any) -> Any:
        self._suspensions.one_more()
        return waited_for


class Surface:
    """A router's HTTP side over in-process replicas, new for one request."""

    def __init__(self, story: str, own_port: bool) -> None:
        prefill, decode, more = STORIES[story]
        self.wanted = request(**more)
        self.router, self.prefill, self.decode = fleet(prefill, decode)
        for handle in (self.prefill, self.decode):
            handle.replicas.reverse()
            handle.in_order = True
            handle.grants_at_once = own_port
        if "late" in story:
            self.router.limits = LIMITS.model_copy(update={"prefill_timeout_s": 0.05})
        router: Any = self.router
        self.http: Any = build_http(router, [digest(KEY)])
        self.client = Client(self.wanted, own_port)

    def serve(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.http(self.client.scope, self.client.receive, self.client.send))

    async def at_baseline(self) -> None:
        """Check that nothing runs, no slot is taken, and no KV waits for a decode engine without
        the request.
        """
        self.client.leave()
        await at_rest(self.prefill, self.decode)
        assert _taken(self.http, self.router) == (0, 0, {})
        assert set(self.prefill.discarded) <= set(transfers(self.prefill))
        fetched = {one for one in transfers(self.prefill) if one in self.prefill.delivered}
        assert fetched - set(self.prefill.discarded) <= set(transfers(self.decode))
        _closed(self.prefill)
        _closed(self.decode)


def _taken(http: Any, router: Router) -> tuple[int, float, dict[Any, int]]:
    assert isinstance(http, Authenticated)
    return router.ongoing, value_of(router.metrics.ongoing), http._limiter._taken  # noqa: SLF001


def _counted(router: Router) -> list[int]:
    """Return the statuses that the router has counted; 499 if the client left before a status."""
    samples = next(iter(router.metrics.requests.collect())).samples
    totals = [(int(one.labels["status"]), int(one.value)) for one in samples if one.name.endswith("_total")]
    return [status for status, count in totals for _ in range(count)]


def _closed(handle: Handle) -> None:
    assert (handle.taken, handle.running) == (0, 0)


async def _whole(story: str, own_port: bool) -> int:
    """Return the number of waits of an undisturbed request."""
    counted = Suspensions()
    asyncio.get_running_loop().set_task_factory(counted)
    surface = Surface(story, own_port)
    await surface.serve()
    waits = counted.waits
    await surface.at_baseline()
    assert surface.client.ended
    assert surface.client.status == (400 if "refuses" in story else 200)
    return waits


def _cancel(serving: list[asyncio.Task[None]]) -> None:
    serving[0].cancel()


@pytest.mark.parametrize("own_port", [False, True], ids=["proxy", "own port"])
@pytest.mark.parametrize("ending", ["cancelled", "left"])
@pytest.mark.parametrize("story", STORIES)
async def test_at_each_suspension(story: str, ending: str, own_port: bool) -> None:
    """Serve or a disconnect cancels the request: everything is released, and no client gets a
    500.
    """
    loop = asyncio.get_running_loop()
    try:
        waits = await _whole(story, own_port)
        assert waits > 10
        discards = left = 0
        for n in range(1, waits + 1):
            surface = Surface(story, own_port)
            serving: list[asyncio.Task[None]] = []
            acts: dict[str, Callable[[], object]] = {
                "cancelled": partial(_cancel, serving),
                "left": surface.client.leave,
            }
            loop.set_task_factory(Suspensions(n, acts[ending]))
            serving.append(surface.serve())
            await asyncio.wait(serving)
            loop.set_task_factory(None)
            if not serving[0].cancelled():
                serving[0].result()
            await surface.at_baseline()
            assert surface.client.status in (None, 200, 400), f"HTTP {surface.client.status} at wait {n}"
            (counted,) = _counted(surface.router)
            assert counted == (surface.client.status or counted), f"at wait {n}"
            left += counted == 499
            if ending == "left" and counted == 499:
                assert value_of(surface.router.metrics.disconnects) == 1, f"at wait {n}"
            discards += len(surface.prefill.discarded)
        assert left > 0, "no client disconnected before its answer"
        prefill, _, more = STORIES[story]
        splits = bool(prefill) and "echo" not in more and "no prefill" not in story
        assert (discards > 0) == splits, "only KV that no engine fetches is discarded"
    finally:
        loop.set_task_factory(None)
