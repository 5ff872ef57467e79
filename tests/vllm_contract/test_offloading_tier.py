"""TandemStoreTier under vLLM's own TieringOffloadingManager and CPU tier, loaded by its factory."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from vllm.v1.kv_offload.base import Locality, LookupResult, Medium

from connectors.errors import ConfigurationError
from connectors.store.tiers.objects import ObjectName
from tests.campaigns.store import tier_campaign
from tests.campaigns.store.tier_world import BLOCK_BYTES, TieredEngine, keys_of, until
from tests.campaigns.store.world import FaultyFiles

PATIENT = {"lookup_s": 10.0, "load_s": 10.0, "store_s": 10.0}
KEYS = keys_of(1, 5)


class Host:
    """Engines over one path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.engines: list[TieredEngine] = []

    def start(self, limits: dict[str, float] = PATIENT, **options: object) -> TieredEngine:
        engine = TieredEngine(self.path, limits=limits, **options)  # type: ignore[arg-type]
        self.engines.append(engine)
        return engine


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "disk")
    yield made
    for engine in made.engines:
        engine.close()


def stored(engine: TieredEngine) -> None:
    context = engine.request()
    assert engine.find(KEYS, context) == 0
    engine.compute(KEYS, context)
    engine.finish(context)
    assert until(engine.settled)


def found(engine: TieredEngine) -> int | None:
    context = engine.request()
    number = engine.find(KEYS, context)
    assert engine.wrong(KEYS[:number], context) == []
    engine.finish(context)
    assert until(engine.settled)
    return number


def object_files(engine: TieredEngine) -> list[Path]:
    names = [engine.tier.name(key) for key in KEYS]
    return [engine.path / "objects" / name.space.hex() / name.key.hex() for name in names]


def test_another_engine_loads_stored_chunks(host: Host) -> None:
    stored(host.start())
    second = host.start()
    assert found(second) == 5
    assert found(second) == 5, "from vLLM's CPU tier"
    assert second.tier.remembered == 0


def test_chunks_of_another_model_are_not_found(host: Host) -> None:
    stored(host.start())
    assert found(host.start(model="/nowhere/other")) == 0


def test_other_image_processing_is_another_namespace(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's name of an image does not depend on the files of the model's folder."""
    monkeypatch.setattr("connectors.vllm_hma.offloading_tier.process_start_s", lambda: math.inf)
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    stored(host.start(model=str(model)))
    assert found(host.start(model=str(model))) == len(KEYS)
    (model / "preprocessor_config.json").write_text("{}")
    assert found(host.start(model=str(model))) == 0


def test_weights_that_changed_after_the_start_are_refused(host: Host, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(ConfigurationError, match="changed after this process started"):
        host.start(model=str(tmp_path))


def test_a_corrupt_chunk_is_a_miss_and_the_others_are_kept(host: Host) -> None:
    first = host.start()
    stored(first)
    path = object_files(first)[3]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    second = host.start()
    assert found(second) == 3
    assert second.folder.counts.corrupt == 1
    assert not path.exists()
    assert found(second) == 3


@pytest.mark.parametrize("call", ["head", "read"])
def test_a_disk_that_hangs_ends_the_wait_after_lookup_s(host: Host, call: str) -> None:
    """``load_s`` is an hour. The late read leaves vLLM's memory alone."""
    stored(host.start())
    files = FaultyFiles()
    engine = host.start({"lookup_s": 0.05, "load_s": 3600.0, "store_s": 10.0}, files=files)
    files.hang(call)
    context = engine.request()
    assert engine.find(KEYS, context) == 0
    before = engine.rows.copy()
    files.heal()
    assert until(engine.settled)
    assert np.array_equal(engine.rows, before)
    engine.finish(context)


def test_a_hanging_write_releases_the_chunks_at_its_deadline(host: Host) -> None:
    """vLLM's CPU tier cannot evict a chunk before the tier's job has ended."""
    files = FaultyFiles()
    engine = host.start(PATIENT | {"store_s": 0.05}, files=files)
    files.hang("write")
    context = engine.request()
    engine.compute(KEYS, context)

    def released() -> bool:
        engine.step()
        return not engine.manager.has_pending_work()

    assert until(released)
    engine.finish(context)
    engine.rows[:] = 0
    files.heal()
    assert until(engine.settled)
    engine.close()
    host.engines.clear()
    # The stored object is right, although vLLM has reused the source blocks.
    assert found(host.start()) is not None


def test_a_reset_of_the_cache_ends_the_use_of_stored_chunks(host: Host) -> None:
    """The weights may have changed in memory."""
    engine = host.start()
    stored(engine)
    engine.manager.reset_cache()
    assert found(engine) == 0
    assert found(host.start()) == 5, "a restarted engine has the weights of the files"


def test_events_for_stored_and_evicted_chunks(host: Host) -> None:
    """The disk has room for three of five chunks; then vLLM resets its caches."""
    room = 3 * (BLOCK_BYTES + 4096) / (1 << 30)
    engine = host.start(PATIENT | {"disk_gib": room}, events=True)
    stored(engine)
    first, evicted = engine.manager.take_events()
    assert (first.keys, first.medium, first.removed) == (KEYS, Medium.STORAGE, False)
    assert (evicted.medium, evicted.removed) == (Medium.STORAGE, True)
    kept = [key for key, path in zip(KEYS, object_files(engine), strict=True) if path.exists()]
    assert sorted(evicted.keys) == sorted(set(KEYS) - set(kept))
    assert len(kept) == 3
    engine.manager.reset_cache()
    (rest,) = engine.manager.take_events()
    assert (sorted(rest.keys), rest.removed) == (sorted(kept), True)


def test_an_unknown_locality_is_refused_by_name(host: Host) -> None:
    with pytest.raises(ConfigurationError, match="secondary_tiers: locality must be LOCAL or REMOTE, not 'local'"):
        host.start(PATIENT | {"locality": "local"})  # type: ignore[arg-type]
    assert host.start(PATIENT | {"locality": "REMOTE"}).tier.locality is Locality.REMOTE  # type: ignore[arg-type]


def test_lookups_retry_until_they_are_answered(host: Host) -> None:
    engine = host.start()
    context = engine.request()
    assert engine.manager.lookup(KEYS[0], context) is LookupResult.RETRY
    engine.step()
    assert until(lambda: engine.manager.lookup(KEYS[0], context) is LookupResult.MISS)
    engine.finish(context)


def test_another_layout_of_pages_is_another_namespace(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads and tokens would be exchanged, and every digest would be right."""
    stored(host.start())
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert found(host.start()) == 0


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_model_of_the_hub_needs_its_commit(host: Host, revision: str | None) -> None:
    """vLLM does not report its ``--revision``: the tier would load KV of another one."""
    with pytest.raises(ConfigurationError, match="revision must be the commit of /nowhere/model"):
        host.start(PATIENT | {"revision": revision})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"model_type": "llava", "vision_config": {}}, "vision_config"),
        ({"model_type": "qwen2_5_omni", "thinker_config": {"audio_config": {}}}, "audio_config"),
        ({"model_type": "phi4mm", "img_processor": {}}, "img_processor"),
    ],
)
def test_models_with_images_need_hashed_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, object], key: str
) -> None:
    """vLLM may name images by counters, which begin anew with each process."""
    monkeypatch.setattr("connectors.vllm_hma.offloading_tier.process_start_s", lambda: math.inf)
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").touch()
    with pytest.raises(ConfigurationError, match=f"has a {key}; set media_is_hashed"):
        TieredEngine(tmp_path / "disk", model=str(model))
    TieredEngine(tmp_path / "disk", model=str(model), limits=PATIENT | {"media_is_hashed": True}).close()


def test_part_of_a_long_prompt_is_found_in_time(host: Host) -> None:
    """A call looks up 64 keys, so those of the beginning are answered although later ones are
    late.
    """
    stored(host.start())
    engine = host.start({"lookup_s": 1.0, "load_s": 10.0, "store_s": 10.0})
    find_all, calls = engine.folder.find_all, 0

    def slow_after_the_first(names: Sequence[ObjectName]) -> list[bool]:
        nonlocal calls
        calls += 1
        if calls > 1:
            time.sleep(1.5)
        return find_all(names)

    engine.folder.find_all = slow_after_the_first  # type: ignore[method-assign]
    context = engine.request()
    assert engine.find(keys_of(1, 100), context) == 5
    engine.finish(context)
    assert until(engine.settled)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "relative"}, "store.path must be an absolute path, not 'relative'"),
        ({"path": "/dev/null/store"}, "/dev/null cannot be used"),
        ({"path": "/tmp", "lookup_s": 0}, "store.lookup_s must be positive"),
    ],
)
def test_wrong_settings_are_refused(host: Host, options: dict[str, object], message: str) -> None:
    limits = {key: value for key, value in options.items() if key != "path"}
    with pytest.raises(ConfigurationError, match=message):
        TieredEngine(Path(str(options["path"])), limits=limits)  # type: ignore[arg-type]


def test_a_cut_of_the_fault_campaign(tmp_path: Path) -> None:
    """Thirty faults; `make store-tier-faults` draws ten thousand."""
    outcome = tier_campaign.run(tmp_path, seed=2, faults=30)
    assert outcome.right, outcome
    assert outcome.hit_tokens > 0


def test_the_campaign_finds_a_tier_that_does_not_check_its_payloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("connectors.store.tiers.folder.check_payload", lambda *_: None)
    # On a busy machine, many lookups are late, so few chunks are loaded.
    assert tier_campaign.run(tmp_path, seed=2, faults=150).wrong
