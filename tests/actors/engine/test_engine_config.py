"""vLLM's configuration of an engine, and what routers learn of it: slots, KV and stores."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext

from actors.engine.engine_actor import EngineActor
from actors.engine.vllm_engine import DESCRIBE, StopFlag, VllmEngine, engine_config, frontend_digest, slots_of
from actors.engine_pool.engines import EnginePool, publish, replicas_of
from actors.policy.admission import KvCache
from actors.policy.prefixes import EngineStore
from configs.settings.deployment import RoleSettings
from configs.settings.parsing import parse_settings
from configs.settings.service import DEMO_MODEL_DIR


@pytest.mark.parametrize("tp_size", [1, 2])
def test_batch_defaults_are_those_of_vllm_serve(tp_size: int) -> None:
    """Batch sizes are those of a server: larger on a GPU, and on a CPU with two ranks."""
    arguments = AsyncEngineArgs(model=str(DEMO_MODEL_DIR), tensor_parallel_size=tp_size, enforce_eager=True)
    tokens, sequences = (each[UsageContext.OPENAI_API_SERVER] for each in AsyncEngineArgs.get_batch_defaults(tp_size))
    found = engine_config(arguments).scheduler_config
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (tokens, sequences)


def test_engines_that_answer_differently_are_not_alike() -> None:
    """A stream does not move to an engine whose sampler differs."""
    changes: list[dict[str, Any]] = [
        {},
        {"max_model_len": 1024},
        {"max_logprobs": 5},
        {"logprobs_mode": "processed_logprobs"},
        {"logits_processors": ["package:Processor"]},
    ]

    def digest(**more: Any) -> str:
        config = engine_config(AsyncEngineArgs(model=str(DEMO_MODEL_DIR), enforce_eager=True, **more))
        return frontend_digest({}, "template", config)

    assert len({digest(**one) for one in changes}) == len(changes)
    assert digest() == digest()


async def test_weights_are_hashed_while_vllm_loads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The workers need the digests after loading; reading the files again could take minutes."""
    begun: list[Path] = []

    def load(*_: object) -> None:
        begun.append(Path("vLLM loads"))
        raise RuntimeError("far enough")

    for patched in ("kill_process_tree.ignore_ended_processes", "resource_tracker.detach_resource_tracker"):
        monkeypatch.setattr(f"actors.upstream.vllm_processes.{patched}", lambda: None)
    monkeypatch.setattr("actors.engine.vllm_engine.may_fork", lambda *_: False)
    monkeypatch.setattr("connectors.vllm_hma.model.weights.begin_digests", begun.append)
    monkeypatch.setattr("actors.upstream.vllm_replaying_llm.ReplayingLLM.start", load)
    settings = parse_settings({"engine": {"max_model_len": 2048}})
    with pytest.raises(RuntimeError, match="far enough"):
        await VllmEngine.start(settings, "prefill", "127.0.0.1")
    assert begun == [Path(settings.model_path), Path("vLLM loads")]


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
            kv_transfer_params={"remote_port": 1, "identity": "i", "kv_cache": KV_CACHE}
            | ({"store": store} if store else {})
        )


KV_CACHE = {"blocks": 10, "groups": [(64, 0), (64, 128)]}
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
    engine.described = [await engine.probe(DESCRIBE, 5, rank) for rank in engine.ranks]
    actor._describe_ranks()  # noqa: SLF001
    handle: Any = SimpleNamespace(deployment_id=f"stores {ranks}")
    handle.options = lambda: handle
    # Plain values only, like the rest of the metadata.
    publish(handle.deployment_id, {"r1": json.loads(json.dumps(actor.record_replica_metadata()))})
    pool = EnginePool("decode", handle)
    engines = pool.engines()
    assert {name: one.store for name, one in engines.items() if one.store is not None} == known
    assert {one.metadata["kv_tokens"] for one in replicas_of(handle.deployment_id).values()} == {700}
    assert {one.kv_cache for one in engines.values()} == {KvCache(700, 10, ((64, 0), (64, 128)))}
    assert [one.identity for one in engines.values()] == ["i"] * len(ranks)
    await pool.close()
    for server in actor._rpc_servers:  # noqa: SLF001
        await server.close()
