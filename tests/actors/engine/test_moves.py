"""The order in which the streams of an engine that takes no calls move, and where they stay."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from actors.engine.engine_actor import Decode, EngineActor, Prefill
from actors.engine.moves import AT_ONCE, MOVES_S, move_streams
from actors.engine_pool.engines import publish, replicas_of
from actors.engine_pool.slots import EngineReplica, SlotPool, SlotRequest
from actors.rpc.address import RpcAddress
from actors.rpc.server import RpcServer, replica_metadata

pytestmark = pytest.mark.usefixtures("virtual_time")

OWN = "model a template"


class Engine:
    """An engine whose streams end a while after they were told to move."""

    described = ({"identity": "model", "frontend": "a template"},)
    stuck: frozenset[str] = frozenset()

    def __init__(self, streams: dict[str, int]) -> None:
        self.streams = dict(streams)
        self.told: list[str] = []
        self.most = 0

    def movable(self, rank: int) -> dict[str, int]:
        return dict(self.streams)

    async def move(self, request_id: str, rank: int) -> None:
        self.told.append(request_id)
        self.most = max(self.most, len(self.told) - self.ended)
        asyncio.get_running_loop().call_later(1.0, self._end, request_id)

    def _end(self, request_id: str) -> None:
        if request_id in self.stuck:
            return
        del self.streams[request_id]

    @property
    def ended(self) -> int:
        return sum(each not in self.streams for each in self.told)


@pytest.mark.parametrize(
    ("others", "moves"),
    [({"other", OWN}, True), ({"other"}, False), ({"model another template"}, False), (set(), False)],
    ids=["another engine", "only other models", "only other templates", "alone"],
)
async def test_the_longest_streams_move_first(others: set[str], moves: bool) -> None:
    streams = {f"{number:02}": number for number in range(2 * AT_ONCE + 1)}
    engine: Any = Engine(streams)
    server: Any = SimpleNamespace(refuses=asyncio.Event())
    moving = asyncio.create_task(move_streams(engine, 0, server, lambda: others))
    await asyncio.sleep(5)
    assert engine.told == []
    server.refuses.set()
    await asyncio.sleep(10)
    moving.cancel()
    assert engine.told == (sorted(streams, reverse=True) if moves else [])
    assert engine.most == (AT_ONCE if moves else 0)


async def test_streams_that_do_not_end_do_not_keep_others_from_moving() -> None:
    """Their clients read nothing, or no engine has a slot for them."""
    streams = {f"{number:02}": number for number in range(2 * AT_ONCE)}
    engine: Any = Engine(streams)
    engine.stuck = frozenset(sorted(streams)[AT_ONCE:])
    server: Any = SimpleNamespace(refuses=asyncio.Event())
    server.refuses.set()
    moving = asyncio.create_task(move_streams(engine, 0, server, lambda: {OWN}))
    await asyncio.sleep(MOVES_S + 1)
    moving.cancel()
    assert engine.told == sorted(streams, reverse=True)


@pytest.mark.parametrize("role", [Decode, Prefill])
async def test_an_operator_drains_an_engine_and_resumes_it(role: type[EngineActor]) -> None:
    """A drained engine refuses calls as a full one does: routers ask it again."""
    server = RpcServer(cast("Any", None), 1)

    class Replica(role):  # type: ignore[misc, valid-type]
        replica, _rpc_servers = "r", (server,)

        def __init__(self) -> None:
            """Start no engine."""

        def __del__(self) -> None:
            """Replace Serve's hook."""

    async def refusal() -> str | None:
        failure = await server._refusal()  # noqa: SLF001
        return None if failure is None else failure.kind

    replica = Replica()
    found = [(await refusal(), await replica.record_routing_stats())]
    for on in (True, False, True):
        told = await replica.drain(on)
        assert told == {"role": role.role, "replica": "r", "drained": on, "ongoing": 0}
        found.append((await refusal(), await replica.record_routing_stats()))
    assert found == [(None, {}), ("full", {"drained": True})] * 2
    await server.drain()
    await replica.drain(False)
    assert await refusal() == "leaving"


def engines(**of: dict[str, Any]) -> dict[str, EngineReplica]:
    """Return engines by name, as routers and replicas read them from Serve's list."""
    metadata = {name: replica_metadata(RpcAddress(name, 1, "key"), 9, slots=9) | one for name, one in of.items()}
    publish("decode", metadata)
    return dict(replicas_of("decode"))


async def test_streams_move_to_engines_that_accept_calls() -> None:
    """A replica of an earlier release does not announce that it resumes streams."""
    listed = engines(
        own={"identity": "a", "resumes": True},
        other={"identity": "b", "frontend": "a template", "resumes": True},
        speculates={"identity": "c", "resumes": False},
        earlier={"identity": "d"},
        drained={"identity": "e", "resumes": True, "drained": True},
    )
    replica: Any = SimpleNamespace(replica="own", _peers=SimpleNamespace(engines=lambda: listed))
    assert Decode._others(replica) == {"b a template"}  # noqa: SLF001
    pool = SlotPool(lambda: listed)
    assert "drained" not in pool.ongoing()
    assert pool.take_now(SlotRequest(prefer=("drained",), avoid=listed.keys() - {"drained"})) is None
