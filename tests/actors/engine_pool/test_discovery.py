"""The choice among replicas."""

from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from actors.engine_pool.engines import EnginePool, engine_names, publish, ranked_metadata, replicas_of
from actors.engine_pool.slots import SlotPool, rank
from actors.rpc.address import RpcAddress
from actors.rpc.server import replica_metadata


def test_equals_take_turns():
    """Over any number of rotations, equally loaded replicas get equal numbers of requests."""
    firsts = Counter(rank({"a": 1, "b": 1, "c": 1, "d": 5}, turn)[0] for turn in range(9))
    assert firsts == {"a": 3, "b": 3, "c": 3}


def test_each_data_parallel_rank_is_an_engine():
    """Each rank has its own address, slots and producer; an engine without ranks keeps the
    replica's id.
    """
    of_ranks = [
        replica_metadata(RpcAddress("h", port, "key"), 7, slots=4, producer={"remote_port": port + 10})
        for port in (1, 2)
    ]
    alone = replica_metadata(RpcAddress("h", 3, "key"), 7, slots=9)
    publish("ranks", {"a": ranked_metadata(of_ranks), "b": ranked_metadata([alone])})
    engines = replicas_of("ranks")
    found = {
        name: (one.replica, one.rank, one.address.port, one.slots, one.metadata.get("producer"))
        for name, one in engines.items()
    }
    assert found == {
        "a-dp0": ("a", 0, 1, 4, {"remote_port": 11}),
        "a-dp1": ("a", 1, 2, 4, {"remote_port": 12}),
        "b": ("b", 0, 3, 9, None),
    }
    assert [*engine_names("a", 2), *engine_names("b", 1)] == list(engines)


async def test_a_count_of_replicas_lists_the_engines_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each health check counts them, also in a large fleet."""
    one = replica_metadata(RpcAddress("h", 1, "key"), 7, slots=4)
    publish("many", {f"r{number}": ranked_metadata([one, one]) for number in range(32)})
    handle: Any = SimpleNamespace(deployment_id="many", options=lambda: handle)
    accepting = Mock(side_effect=replicas_of("many").copy)  # type: ignore[attr-defined]
    monkeypatch.setattr(SlotPool, "accepting", accepting)
    assert (EnginePool("decode", handle).replica_count, accepting.call_count) == (32, 1)
