"""Slots of an engine, from its limits."""

from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs

from actors.engine.engine_actor import EngineActor
from actors.engine.vllm_engine import StopFlag, VllmEngine, engine_config, slots_of
from configs.settings.deployment import RoleSettings
from configs.settings.service import DEMO_MODEL_DIR


@pytest.mark.parametrize(
    ("max_num_seqs", "kv_blocks", "slots"),
    [
        (16, 1000, 32),
        (256, 300, 300),  # a sequence needs at least a block
        (1, 1000, 2),
        (256, 0, 512),  # models without KV cache groups
        (16, 1, 1),
    ],
)
def test_twice_the_sequences_of_a_step_that_have_a_block(max_num_seqs: int, kv_blocks: int, slots: int) -> None:
    """The engine accepts as many waiting requests as running ones."""
    assert slots_of(max_num_seqs, kv_blocks) == slots


class Actor(EngineActor):
    """An actor with a given engine."""

    role = "decode"

    def __init__(self, engine: VllmEngine) -> None:
        self.engine, self.replica, self._node_ip = engine, "r1", "127.0.0.1"
        self._changes_adapters = False

    def __del__(self) -> None:  # type: ignore[override]
        """Nothing: each test closes the RPC servers."""


async def pinged(_: int) -> None:
    """Answer as the engine core of a running rank."""


@pytest.mark.parametrize(("settings", "slots"), [({}, 48), ({"max_ongoing_sequences": 5}, 5)])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_routers_learn_the_engines_slots(settings: dict[str, Any], slots: int, ranks: int) -> None:
    """Unset, the limit of each rank follows vLLM's configuration; the RPC servers enforce it."""
    config = engine_config(AsyncEngineArgs(model=str(DEMO_MODEL_DIR), max_num_seqs=24, enforce_eager=True))
    config.cache_config.num_gpu_blocks = 1000
    llm: Any = SimpleNamespace(errored=False, ping_rank=pinged, vllm_config=config)
    app: Any = None
    engine = VllmEngine(llm, app, StopFlag(), AsyncExitStack(), None, load=None, supervisor="", ranks=ranks)
    actor = Actor(engine)
    await actor._open_rpc_servers(RoleSettings(**settings))  # noqa: SLF001
    metadata = actor.record_replica_metadata()
    assert [one["slots"] for one in metadata.get("ranks", [metadata])] == [slots] * ranks
    assert [server._slots for server in actor._rpc_servers] == [slots] * ranks  # noqa: SLF001
    for server in actor._rpc_servers:  # noqa: SLF001
        await server.close()
