"""Engines of a dead node count as ended node_lost_s after Ray's report, once; failed reports
repeat.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import SecretStr

from actors.engine import engine_actor, node_failures
from actors.engine.engine_actor import Decode, Prefill
from actors.engine.node_failures import dead_nodes_now, grace_s, watch_nodes
from actors.errors import EngineStartError
from actors.upstream.ray_private import RECONNECT_VARIABLE
from configs.settings.parsing import parse_settings
from configs.settings.service import ServiceSettings


async def test_a_node_is_lost_some_time_after_it_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 s after Ray's report, also if Ray has forgotten the node, and never again. Nodes that were
    dead at the engine's start had no contact with it.
    """
    polls = [(100, "old a"), (109.9, "old a b"), (110, "old a b"), (111, "a b"), (119.8, "a"), (119.9, "a"), (999, "a")]
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    told: list[tuple[str, float]] = []

    def dead_nodes() -> list[str]:
        clock.now, dead = polls.pop(0) if len(polls) > 1 else polls[0]
        return dead.split()

    async def tell(engines: str) -> None:
        told.append((engines, clock.now))

    for name, value in (("_dead_nodes", dead_nodes), ("POLL_S", 0.001), ("time", clock)):
        monkeypatch.setattr(node_failures, name, value)
    watch = asyncio.create_task(watch_nodes(tell, 10, ["old"]))
    while clock.now < 999:  # noqa: ASYNC110 - the watch has no event for it
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.02)
    watch.cancel()
    assert told == [("a.", 110), ("b.", 119.9)]


@pytest.mark.parametrize(
    ("reconnect_s", "setting", "grace"),
    [
        (None, None, 300.0),  # 120 s for the connection, 60 s for reconnecting, 120 s of margin
        ("600", None, 840.0),  # KubeRay's value with fault tolerance
        (None, 180.0, 180.0),
        ("600", 720.0, 720.0),
        ("8", 200.0, 200.0),
    ],
)
def test_the_grace_period_outlasts_a_cut_off_node(
    monkeypatch: pytest.MonkeyPatch, reconnect_s: str | None, setting: float | None, grace: float
) -> None:
    """The grace period follows from this node's timeouts, which the cluster's other workers
    share.
    """
    monkeypatch.delenv(RECONNECT_VARIABLE, raising=False)
    if reconnect_s is not None:
        monkeypatch.setenv(RECONNECT_VARIABLE, reconnect_s)
    assert grace_s(setting) == grace


@pytest.mark.parametrize(("reconnect_s", "setting"), [("60", 179.9), ("600", 300.0)])
def test_a_grace_period_that_is_too_short(monkeypatch: pytest.MonkeyPatch, reconnect_s: str, setting: float) -> None:
    """The prefill engine of a cut-off node could still write."""
    monkeypatch.setenv(RECONNECT_VARIABLE, reconnect_s)
    with pytest.raises(EngineStartError, match=r"transfer\.node_lost_s must be at least (180|720) s, not"):
        grace_s(setting)


@pytest.fixture
def ray_says(monkeypatch: pytest.MonkeyPatch) -> list[list[str] | Exception]:
    """Ray's answers, one per poll, the last one repeatedly."""
    answers: list[list[str] | Exception] = []

    def dead_nodes() -> list[str]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(node_failures, "_dead_nodes", dead_nodes)
    monkeypatch.setattr(node_failures, "POLL_S", 0.001)
    return answers


async def test_the_watch_goes_on_after_failures(ray_says):
    """Ray's head does not answer, then the engine refuses the report: both are retried."""
    ray_says += [ConnectionError("no head"), [], ConnectionError("no head"), ["a"]]
    told: list[str] = []
    done = asyncio.Event()

    async def tell(engines: str) -> None:
        told.append(engines)
        if len(told) == 1:
            raise RuntimeError("the engine is busy dying")
        done.set()

    watch = asyncio.create_task(watch_nodes(tell, 0.001, await dead_nodes_now()))
    await asyncio.wait_for(done.wait(), 10)
    await asyncio.sleep(0.02)
    watch.cancel()
    assert told == ["a.", "a."]


async def test_a_node_that_dies_right_after_the_first_look_is_told(ray_says, monkeypatch):
    """A decode replica contacts prefill engines only after the first look, so this node counts."""
    ray_says += [["old"], ["old", "met"]]
    told: asyncio.Queue[str] = asyncio.Queue()

    class Engine:
        slots = 1
        kv_tokens = 0
        can_resume = True
        ranks = range(1)
        described: tuple[dict[str, object], ...] = ({},)

        @classmethod
        async def start(cls, settings: ServiceSettings, *_: object) -> "Engine":
            assert settings.transfer.secret == SecretStr("x" * 16), "the build's"
            assert len(ray_says) == 2, "nodes that died before this engine's start do not count"
            return cls()

        async def lose(self, engines: str) -> None:
            told.put_nowait(engines)

    async def warm_up_new_pairs(self: Decode) -> None:
        assert len(ray_says) == 1, "the engine contacts a peer before it has read Ray's dead nodes"

    class Unended(Decode):
        def __del__(self) -> None:  # type: ignore[override]
            pass

    monkeypatch.setattr(engine_actor, "VllmEngine", Engine)
    monkeypatch.setattr(engine_actor.serve, "get_replica_context", lambda: SimpleNamespace(replica_id=ReplicaID()))
    monkeypatch.setattr(engine_actor.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(Decode, "warm_up_new_pairs", warm_up_new_pairs)
    monkeypatch.setattr(engine_actor.PeerReplicas, "engines", lambda _: {})
    monkeypatch.setattr(engine_actor, "grace_s", lambda setting: setting)
    decode = Unended.__new__(Unended)
    await Unended.__init__(decode, parse_settings({"transfer": {"node_lost_s": 0.001}}), SecretStr("x" * 16))
    assert await asyncio.wait_for(told.get(), 10) == "met."
    for task in asyncio.all_tasks():
        if task.get_name() in ("watches-nodes", "meets-prefill-replicas", "empties-the-engine"):
            task.cancel()
    assert told.empty()


async def test_a_prefill_engine_is_told_too(ray_says, monkeypatch):
    """It remembers failed transfers to decode engines of the node."""
    ray_says += [[], ["met"]]
    told: asyncio.Queue[str] = asyncio.Queue()

    class Engine:
        ranks = range(0)

        async def lose(self, engines: str) -> None:
            told.put_nowait(engines)

    class Alone(Prefill):
        engine: Any

        def __init__(self) -> None:
            self.engine, self._rpc_servers = Engine(), []

        async def start(self) -> None:
            await self._prepare(parse_settings({"transfer": {"node_lost_s": 0.001}}))

        async def _warm_up_pairs(self) -> None:
            pass

        def __del__(self) -> None:  # type: ignore[override]
            pass

    monkeypatch.setattr(engine_actor, "grace_s", lambda setting: setting)
    await Alone().start()
    assert await asyncio.wait_for(told.get(), 10) == "met."
    next(task for task in asyncio.all_tasks() if task.get_name() == "watches-nodes").cancel()


class ReplicaID:
    """Part of Serve's ReplicaID that a replica reads."""

    unique_id = "one"
