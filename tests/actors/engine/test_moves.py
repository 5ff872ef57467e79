"""The order in which a stopping engine's streams move, and where they stay."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine.engine_actor import Decode
from actors.engine.moves import AT_ONCE, MOVES_S, move_streams

pytestmark = pytest.mark.usefixtures("virtual_time")

OWN = "model a template"


class Engine:
    """An engine whose streams end a while after they were told to move."""

    described = ({"identity": "model", "frontend": "a template"},)
    can_resume = True
    stuck: frozenset[str] = frozenset()

    def __init__(self, streams: dict[str, int]) -> None:
        self.streams = dict(streams)
        self.told: list[str] = []
        self.empty = asyncio.Event()
        self.most = 0

    def movable(self, rank: int) -> dict[str, int]:
        return dict(self.streams)

    async def check_health(self) -> None:
        """It is alive."""

    async def move(self, request_id: str, rank: int) -> None:
        self.told.append(request_id)
        self.most = max(self.most, len(self.told) - self.ended)
        asyncio.get_running_loop().call_later(1.0, self._end, request_id)

    def _end(self, request_id: str) -> None:
        if request_id in self.stuck:
            return
        del self.streams[request_id]
        if not self.streams:
            self.empty.set()

    @property
    def ended(self) -> int:
        return sum(each not in self.streams for each in self.told)


@pytest.mark.parametrize(
    ("others", "moves"),
    [([["other", OWN], ["other"]], True), ([["other"]], False), ([["model", "another template"]], False), ([], False)],
    ids=["another engine", "only other models", "only other templates", "alone"],
)
async def test_the_longest_streams_move_first(others: list[list[str]], moves: bool) -> None:
    async def ask(_: str) -> list[list[str]]:
        return others

    streams = {f"{number:02}": number for number in range(2 * AT_ONCE + 1)}
    engine: Any = Engine(streams)
    server: Any = SimpleNamespace(leaving=asyncio.Event(), ongoing=len(streams))
    peers: Any = SimpleNamespace(ask=ask)
    moving = asyncio.create_task(move_streams(engine, 0, server, peers))
    await asyncio.sleep(5)
    assert engine.told == []
    server.leaving.set()
    await asyncio.sleep(10)
    moving.cancel()
    assert engine.told == (sorted(streams, reverse=True) if moves else [])
    assert engine.most == (AT_ONCE if moves else 0)


async def test_streams_that_do_not_end_do_not_keep_others_from_moving() -> None:
    """Their clients read nothing, or no engine has a slot for them."""

    async def ask(_: str) -> list[list[str]]:
        return [[OWN]]

    streams = {f"{number:02}": number for number in range(2 * AT_ONCE)}
    engine: Any = Engine(streams)
    engine.stuck = frozenset(sorted(streams)[AT_ONCE:])
    server: Any = SimpleNamespace(leaving=asyncio.Event(), ongoing=len(streams))
    server.leaving.set()
    moving = asyncio.create_task(move_streams(engine, 0, server, SimpleNamespace(ask=ask)))  # type: ignore[arg-type]
    await asyncio.sleep(MOVES_S + 1)
    moving.cancel()
    assert engine.told == sorted(streams, reverse=True)


class Server:
    """An RPC server with calls until the engine has no streams."""

    def __init__(self, engine: Engine) -> None:
        self.leaving, self._engine = asyncio.Event(), engine

    @property
    def ongoing(self) -> int:
        return len(self._engine.streams)

    async def drain(self) -> None:
        self.leaving.set()
        await self._engine.empty.wait()


class Replica(Decode):
    """A decode replica without Serve; its streams would run for ever."""

    def __init__(self) -> None:
        self.engine: Any = Engine({"a": 1, "b": 2})
        self._rpc_servers: Any = [Server(self.engine)]
        self._others: Any = SimpleNamespace(ask=self.ask)

    async def ask(self, method: str) -> list[list[str]]:
        return [await getattr(self, method)(), [OWN]]

    def __del__(self) -> None:  # type: ignore[override]
        """Replace Serve's hook."""


async def test_a_stopping_replica_is_empty_once_its_streams_have_moved() -> None:
    replica = Replica()
    assert await replica.identities() == [OWN]
    replica.engine.can_resume = False
    assert await replica.identities() == []
    await replica._drain()  # noqa: SLF001
    assert replica.engine.told == ["b", "a"]
    assert await replica.identities() == []
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "moves-streams" and not task.cancelling()]
