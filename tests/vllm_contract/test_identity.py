"""Properties that two engines must share: weights by content or commit, and resolved dtypes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ResolvedRevision
from vllm.config import VllmConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import connectors.vllm_hma.model.weights as weights
from app.demo.paths import MODEL_DIR
from connectors.errors import ConfigurationError
from connectors.planning.layout import Group, GroupKind
from connectors.protocol.agent_metadata import ModelIdentity
from connectors.store.settings import StoreSettings
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.kv_store.scheduler import StoreScheduler
from connectors.vllm_hma.model.drafts import draft_identity
from connectors.vllm_hma.model.identity import model_identity
from connectors.vllm_hma.model.weights import begin_digests, digest_weights
from connectors.vllm_hma.store_connector import TandemStoreConnector
from tests.vllm_contract.caches import (
    BLOCK_TOKENS,
    BLOCKS,
    WINDOW,
    cache_config,
    cache_folder,
    connector_config,
    full,
    sliding,
    vllm_config,
)
from tests.vllm_contract.stored_prompt import CACHE

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = cache_folder(tmp_path / "cache")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(root))
    return root


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL_DIR, tmp_path / "model"))


def config(model: Path, **overrides: Any) -> VllmConfig:
    made: VllmConfig = vllm_config.__wrapped__(model=str(model), **overrides)
    return made


def flip_a_byte(file: Path) -> None:
    """Change one byte in the middle, and restore the modification time."""
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(before.st_size // 2)
        byte = stream.read(1)
        stream.seek(before.st_size // 2)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_any_byte_of_the_weights_counts(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change in place of equal size and modification time, too. Other ranks and later starts find
    the digest.
    """
    read: list[Path] = []
    digest = weights.digest_file  # `counted` calls it

    def counted(file: Path) -> str:
        read.append(file)
        return digest(file)

    monkeypatch.setattr(weights, "digest_file", counted)
    made = config(model)
    before = model_identity(made)
    assert model_identity(made) == before
    assert read == [model / "model.safetensors"]
    assert model_identity(config(MODEL_DIR)) == before, "a copy elsewhere is the same model"
    flip_a_byte(model / "model.safetensors")
    assert model_identity(made).model != before.model


def test_digests_are_begun_while_weights_load(model: Path, cache_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that asks later reads nothing; without a cache, nothing would be gained."""
    whole = digest_weights(model)
    shutil.rmtree(cache_root)
    for thread in begin_digests(model):
        thread.join()
    monkeypatch.setattr(weights, "digest_file", lambda file: pytest.fail(f"{file} is read again"))
    assert digest_weights(model) == whole
    shutil.rmtree(cache_root)
    cache_root.write_text("not a folder", encoding="utf-8")
    errors: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda error: errors.append(error.exc_value))
    for thread in [*begin_digests(model), *begin_digests(Path("nobody/model"))]:
        thread.join()
    assert errors == []


MOUNTS = """\
21 1 252:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
305 21 0:{minor} /models /models ro,relatime shared:9 - {kind} {source} rw,vers=4.2,addr=10.0.0.5
"""


@pytest.mark.parametrize(
    ("kind", "source", "kept"),
    [("nfs4", "files:/export", True), ("lustre", "10.0.0.1@tcp:/fs", True), ("fuse.sshfs", "host:/models", False)],
)
def test_digests_survive_a_mount_on_another_host(tmp_path: Path, kind: str, source: str, kept: bool) -> None:
    """A remote file system has another number on each host. sshfs makes the inodes up itself."""
    names = []
    for minor in (52, 61):
        mounts = tmp_path / f"{minor}"
        mounts.write_text(MOUNTS.format(minor=minor, kind=kind, source=source))
        names.append(weights._file_system(os.makedev(0, minor), mounts))  # noqa: SLF001
        local = weights._file_system(os.makedev(252, 1), mounts)  # noqa: SLF001
        assert local == str(os.makedev(252, 1))
    assert (names == [source, source]) == kept
    assert kept or names[0] != names[1]


def test_a_cache_folder_that_cannot_be_used_costs_time_only(model: Path, cache_root: Path) -> None:
    """The digest is the same, whether the lock file can be created or not. A digest that others
    could have written is not believed.
    """
    before, folder = digest_weights(model), cache_root / "tandem" / "weights"
    (cached,) = [file for file in folder.iterdir() if file.suffix != ".lock"]
    cached.write_text("0" * 32)
    assert digest_weights(model) != before, "the cached digest is used"
    folder.chmod(0o777)
    assert digest_weights(model) == before
    folder.chmod(0o700)
    cached.unlink()
    cached.with_suffix(f".{os.getpid()}").mkdir()
    assert digest_weights(model) == before
    assert not cached.exists()
    cached.mkdir()
    assert digest_weights(model) == before
    shutil.rmtree(cache_root)
    cache_root.write_text("not a folder", encoding="utf-8")
    assert digest_weights(model) == before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """All such folders would have one identity."""
    shutil.copy(MODEL_DIR / "config.json", tmp_path)
    with pytest.raises(ConfigurationError, match="has no weight files"):
        digest_weights(tmp_path)
    assert model_identity(config(tmp_path, load_format="dummy", skip_tokenizer_init=True))


def test_weights_in_object_storage_are_named_by_their_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM then keeps a folder of configuration files as the model."""
    made = config(MODEL_DIR)
    local = model_identity(made).model
    found = set()
    for address in ("s3://bucket/one", "s3://bucket/other"):
        monkeypatch.setattr(made.model_config, "model_weights", address)
        found.add(model_identity(made).model)
    assert len(found | {local}) == 3
    with pytest.raises(ConfigurationError, match="s3://bucket/other may change"):
        model_identity(made, stored=True)


def of_the_hub(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModelIdentity]:
    """Return a function that returns the identity of a model of the hub at a revision."""
    made = config(MODEL_DIR)
    monkeypatch.setattr(made.model_config, "model", "somebody/model")

    def identity(revision: str | None, stored: bool = False) -> ModelIdentity:
        monkeypatch.setattr(made.model_config, "revision", revision)
        return model_identity(made, stored=stored)

    return identity


def test_a_model_of_the_hub_is_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """``main`` on two hosts may be two commits, and a branch and its commit are one model. Without
    a revision, vLLM uses the hub's default. Stored KV would outlive a change of the branch.
    """
    identity = of_the_hub(monkeypatch)
    resolved = ResolvedRevision(COMMIT, "main", "somebody/model")
    assert identity(resolved) == identity(COMMIT)
    assert identity(resolved) != identity(ResolvedRevision(COMMIT[::-1], "main", "somebody/model"))
    assert identity(None) == identity("main")
    for revision in (None, "main"):
        with pytest.raises(ConfigurationError, match="revision main of somebody/model may change"):
            identity(revision, stored=True)


def test_an_unresolved_revision_is_looked_up_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps a revision unresolved if the hub is unreachable; the files on this host name
    their commit.
    """
    stored = tmp_path / "hub" / "models--somebody--model"
    (stored / "snapshots" / COMMIT).mkdir(parents=True)
    (stored / "snapshots" / COMMIT / "config.json").touch()
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    identity = of_the_hub(monkeypatch)
    assert identity(None) == identity(COMMIT)


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [("auto", "bfloat16", True), ("fp8", "fp8_e4m3", True), ("fp8", "fp8_e5m2", False), ("auto", "float16", False)],
)
def test_cache_dtypes_are_compared_as_resolved(one: str, other: str, equal: bool) -> None:
    """``auto`` is the model's dtype; torch stores every FP8 as uint8, so its dtype does not
    suffice.
    """
    made = config(MODEL_DIR, dtype="bfloat16")
    found = []
    for name in (one, other):
        made.cache_config.cache_dtype = name
        found.append(model_identity(made).cache_dtype)
    assert (found[0] == found[1]) is equal, found


REFUSED: dict[str, tuple[dict[str, Any], Callable[[VllmConfig, pytest.MonkeyPatch], object]]] = {
    # vLLM sets the size back to 1 for models without experts, so the index tells the rank.
    "data-parallel ranks": (
        {"store": {"path": "/disk"}},
        lambda made, _: setattr(made.parallel_config, "data_parallel_index", 1),
    ),
    # Sleep, and `release_kv_cache_memory`, release memory that NIXL keeps registered.
    "enable_sleep_mode": ({}, lambda made, _: setattr(made.model_config, "enable_sleep_mode", True)),
    "enable_cumem_allocator": ({}, lambda made, _: setattr(made.model_config, "enable_cumem_allocator", True)),
    # It zeroes reallocated blocks before it calls the connector.
    "VLLM_USE_V2_MODEL_RUNNER": ({}, lambda _, patch: patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")),
}


@pytest.mark.parametrize("match", REFUSED)
def test_engines_that_are_refused(monkeypatch: pytest.MonkeyPatch, match: str) -> None:
    extra, change = REFUSED[match]
    made = config(MODEL_DIR, kv_transfer_config=connector_config(**extra))
    change(made, monkeypatch)
    with pytest.raises(ConfigurationError, match=match):
        TandemConnector(made, KVConnectorRole.SCHEDULER, cache_config((["f"], full())))


def test_an_engine_reports_its_kv_cache_groups() -> None:
    """With them, they compute the blocks that a request needs."""
    made = config(MODEL_DIR, kv_transfer_config=connector_config())
    connector = TandemConnector(made, KVConnectorRole.SCHEDULER, cache_config((["f"], full()), (["w"], sliding())))
    groups = [(BLOCK_TOKENS, 0), (BLOCK_TOKENS, WINDOW)]
    assert connector.scheduler.described["kv_cache"] == {"blocks": BLOCKS, "groups": groups}
    assert Group(0, GroupKind.STATE, 512, None, ()).kept_tokens == 512


def test_a_length_that_selects_other_positions() -> None:
    """LongRoPE uses other factors, for all positions, beyond the original length."""
    positions = {"original_max_position_embeddings": 512, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    long_rope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0} | positions}
    short, same, long = (
        model_identity(config(MODEL_DIR, hf_overrides=long_rope, max_model_len=length)).model
        for length in (256, 512, 1024)
    )
    assert short == same
    assert short != long


def test_the_same_quantization_of_other_weights() -> None:
    identities = {
        model_identity(config(MODEL_DIR, dtype="bfloat16", quantization="online", quantization_config=arguments)).model
        for arguments in ({"linear": "fp8_per_tensor"}, {"linear": "fp8_per_block"})
    }
    assert len(identities) == 2


def test_weights_that_changed_after_the_start_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM loads weights before the connector reads them, so it may have loaded others."""
    file = model / "model.safetensors"
    changed_s = file.stat().st_ctime
    before = digest_weights(model)
    assert digest_weights(model, changed_s) == before, "written just before the start"
    for started_s in (changed_s - 3.0, changed_s - 1e6):
        with pytest.raises(ConfigurationError, match="changed after this process started"):
            digest_weights(model, started_s)
    # A file server with a fast clock: its times cannot be compared with this host's.
    monkeypatch.setattr("connectors.vllm_hma.model.weights.time.time", lambda: changed_s - 1.0)
    assert digest_weights(model, changed_s - 60.0) == before


@pytest.mark.parametrize("stored", [False, True], ids=["transfers", "store"])
def test_connectors_refuse_weights_that_changed_after_the_start(model: Path, stored: bool) -> None:
    """The copy of the model is newer than this process."""
    kind = TandemStoreConnector if stored else TandemConnector
    extra: dict[str, Any] = {"store": {"path": "/disk"}} if stored else {}
    made = config(model, kv_transfer_config=connector_config(kind.__name__, **extra))
    connector = kind(made, KVConnectorRole.WORKER, cache_config((["f"], full())))
    read = (
        connector.get_handshake_metadata if isinstance(connector, TandemStoreConnector) else connector.worker.identity
    )
    with pytest.raises(ConfigurationError, match="changed after this process started"):
        read()


def test_a_store_is_refused_if_ranks_have_other_weights() -> None:
    """The ranks hashed the files before and after a change."""
    other = replace(CACHE, model=replace(CACHE.model, model="others"))
    scheduler = StoreScheduler(StoreSettings(path="/unused", chunk_tokens=16), 4096)
    with pytest.raises(ConfigurationError, match="ranks report different models"):
        scheduler.publish([CACHE, other])


def test_the_draft_models_weights_are_checked_too(model: Path) -> None:
    speculative = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    made = config(MODEL_DIR, speculative_config=speculative)
    assert draft_identity(made)
    with pytest.raises(ConfigurationError, match="changed after this process started"):
        draft_identity(made, 0.0)


def test_image_processing_is_part_of_the_identity(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's name of an image has neither the engine's settings nor the folder's files."""
    made = config(model)
    text_only = model_identity(made)
    (model / "preprocessor_config.json").write_text('{"do_normalize": true}')
    assert model_identity(made) == text_only, "a text model reads no such file"

    def identity(**settings: Any) -> str:
        monkeypatch.setattr(made.model_config, "multimodal_config", MultiModalConfig(**settings))
        return model_identity(made).model

    found = [
        text_only.model,
        identity(),
        identity(mm_processor_kwargs={"max_pixels": 100}),
        identity(video_pruning_rate=0.5),
    ]
    assert identity(mm_processor_kwargs={"device": "cpu"}) == found[1], "the device computes the same tensors"
    (model / "preprocessor_config.json").write_text('{"do_normalize": false}')
    found.append(identity())
    assert len({*found}) == len(found)
