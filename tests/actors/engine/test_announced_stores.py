"""The KV stores of an engine's ranks, from the connector's reply to what a router decides by."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from actors.engine.vllm_engine import StopFlag, VllmEngine
from actors.engine_pool.engines import EnginePool, publish, replicas_of
from actors.policy.prefixes import EngineStore
from configs.settings.deployment import RoleSettings
from tests.actors.engine.test_slots_of import Actor


class Core:
    """Stands for vLLM's client: each rank's connector answers `describe` with its store."""

    errored = False
    vllm_config = SimpleNamespace(cache_config=SimpleNamespace(kv_cache_size_tokens=700))

    def __init__(self, stores: list[dict[str, Any] | None]) -> None:
        self._stores = stores

    async def ping_rank(self, rank: int) -> None:
        """Answer as the engine core of a running rank."""

    async def generate(
        self, prompt: object, params: Any, request_id: str, data_parallel_rank: int
    ) -> AsyncGenerator[Any, None]:
        assert params.extra_args["kv_transfer_params"]["describe"]
        store = self._stores[data_parallel_rank]
        yield SimpleNamespace(
            kv_transfer_params={"remote_port": 1, "identity": "i"} | ({"store": store} if store else {})
        )


A = {"id": "a", "tokens": 1000, "chunk_tokens": 256}
B = {"id": "b", "tokens": 2000, "chunk_tokens": 256}


@pytest.mark.parametrize(
    ("ranks", "known"),
    [
        ([A], {"r1": EngineStore("a", 1000, 256)}),
        ([A, B], {"r1-dp0": EngineStore("a", 1000, 256), "r1-dp1": EngineStore("b", 2000, 256)}),
        ([None, B], {"r1-dp1": EngineStore("b", 2000, 256)}),
        ([None], {}),
    ],
)
async def test_routers_learn_the_stores_of_all_ranks(
    ranks: list[dict[str, Any] | None], known: dict[str, EngineStore]
) -> None:
    llm: Any = Core(ranks)
    app: Any = None
    engine = VllmEngine(llm, app, StopFlag(), AsyncExitStack(), None, load=None, supervisor="", ranks=len(ranks))
    actor = Actor(engine)
    await actor._open_rpc_servers(RoleSettings(max_ongoing_sequences=5))  # noqa: SLF001
    engine.described = [await engine.describe_connector(5, rank) for rank in engine.ranks]
    actor._describe_ranks()  # noqa: SLF001
    handle: Any = SimpleNamespace(deployment_id=f"stores {ranks}")
    handle.options = lambda: handle
    # Plain values only, like the rest of the metadata.
    publish(handle.deployment_id, {"r1": json.loads(json.dumps(actor.record_replica_metadata()))})
    pool = EnginePool("decode", handle)
    assert pool.stores() == known
    assert {one.metadata["kv_tokens"] for one in (replicas_of(handle.deployment_id) or {}).values()} == {700}
    assert list(pool.identities().values()) == ["i"] * len(ranks)
    await pool.close()
    for server in actor._rpc_servers:  # noqa: SLF001
        await server.close()
