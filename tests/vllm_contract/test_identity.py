"""Properties that two engines must share: weights by content or commit, and resolved dtypes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ResolvedRevision
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

import connectors.vllm_hma.model.weights as weights
from app.demo.paths import MODEL_DIR
from connectors.errors import ConfigurationError
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.model.identity import model_identity
from connectors.vllm_hma.model.weights import digest_weights
from tests.vllm_contract.caches import cache_config, full, vllm_config

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test."""
    root = tmp_path / "cache"
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


def test_any_byte_of_the_weights_counts(model: Path) -> None:
    """An in-place update of equal size and modification time changes the identity."""
    made = config(model)
    before = model_identity(made)
    assert model_identity(config(MODEL_DIR)) == before, "a copy elsewhere is the same model"
    flip_a_byte(model / "model.safetensors")
    assert model_identity(made).model != before.model


def test_weights_are_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks and later starts find the digest; a changed file is read again."""
    read: list[Path] = []
    digest = weights.digest_file  # `counted` calls it

    def counted(file: Path) -> str:
        read.append(file)
        return digest(file)

    monkeypatch.setattr(weights, "digest_file", counted)
    assert digest_weights(model) == digest_weights(model)
    assert read == [model / "model.safetensors"]
    flip_a_byte(model / "model.safetensors")
    digest_weights(model)
    assert len(read) == 2


def test_a_read_only_cache_folder_costs_time_only(model: Path, cache_root: Path) -> None:
    """If nothing can be cached, the digest is the same."""
    before = digest_weights(model)
    shutil.rmtree(cache_root)
    cache_root.write_text("not a folder")
    assert digest_weights(model) == before


def test_a_cache_folder_without_room_costs_time_only(model: Path, cache_root: Path) -> None:
    """The lock file can be created and the digest cannot be written."""
    before = digest_weights(model)
    (cached,) = [file for file in (cache_root / "tandem" / "weights").iterdir() if file.suffix != ".lock"]
    cached.unlink()
    cached.with_suffix(f".{os.getpid()}").mkdir()
    assert digest_weights(model) == before
    assert not cached.exists()
    cached.mkdir()
    assert digest_weights(model) == before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """A folder without weights is refused: all such folders would have one identity."""
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
    with pytest.raises(ConfigurationError, match="s3://bucket/other may change without notice"):
        model_identity(made, stored=True)


def test_stored_kv_needs_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stored KV would outlive a change of the branch, so the identity needs a commit."""
    made = config(MODEL_DIR)
    monkeypatch.setattr(made.model_config, "model", "somebody/model")
    monkeypatch.setattr(made.model_config, "revision", "main")
    assert model_identity(made)
    with pytest.raises(ConfigurationError, match="revision main of somebody/model may change"):
        model_identity(made, stored=True)


def test_an_unset_revision_is_the_hubs_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names it, and an engine that names it has the same identity."""
    made = config(MODEL_DIR)
    monkeypatch.setattr(made.model_config, "model", "somebody/model")
    found = set()
    for revision in (None, "main"):
        monkeypatch.setattr(made.model_config, "revision", revision)
        found.add(model_identity(made).model)
        with pytest.raises(ConfigurationError, match="revision main of somebody/model may change"):
            model_identity(made, stored=True)
    assert len(found) == 1


def test_a_model_of_the_hub_is_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """``main`` on two hosts may be two commits, and a branch and its commit are one model."""
    made = config(MODEL_DIR)
    monkeypatch.setattr(made.model_config, "model", "somebody/model")

    def identity(revision: str | None) -> str:
        monkeypatch.setattr(made.model_config, "revision", revision)
        return model_identity(made).model

    resolved = ResolvedRevision(COMMIT, "main", "somebody/model")
    assert identity(resolved) == identity(COMMIT)
    assert identity(resolved) != identity(ResolvedRevision(COMMIT[::-1], "main", "somebody/model"))


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
    made = config(MODEL_DIR)
    monkeypatch.setattr(made.model_config, "model", "somebody/model")
    monkeypatch.setattr(made.model_config, "revision", None)
    found = model_identity(made)
    monkeypatch.setattr(made.model_config, "revision", COMMIT)
    assert model_identity(made) == found


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


def test_a_store_is_refused_on_data_parallel_ranks() -> None:
    """Rank 1 is told apart by its index: vLLM sets the size back to 1 for models without
    experts.
    """
    transfer = KVTransferConfig(
        kv_connector="TandemConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"store": {"path": "/disk"}},
    )
    made = config(MODEL_DIR, kv_transfer_config=transfer)
    made.parallel_config.data_parallel_index = 1
    with pytest.raises(ConfigurationError, match="store is not tested with several data-parallel ranks"):
        TandemConnector(made, KVConnectorRole.SCHEDULER, cache_config((["f"], full())))


@pytest.mark.parametrize("option", ["enable_sleep_mode", "enable_cumem_allocator"])
def test_memory_that_vllm_may_release_is_refused(option: str) -> None:
    """Sleep, and `release_kv_cache_memory`, release memory that NIXL keeps registered."""
    transfer = KVTransferConfig(kv_connector="TandemConnector", kv_role="kv_both", kv_load_failure_policy="recompute")
    made = config(MODEL_DIR, kv_transfer_config=transfer)
    setattr(made.model_config, option, True)
    with pytest.raises(ConfigurationError, match=option):
        TandemConnector(made, KVConnectorRole.SCHEDULER, cache_config((["f"], full())))


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
    """The quantization's arguments select weights and granularity, so they change the identity."""
    identities = {
        model_identity(config(MODEL_DIR, dtype="bfloat16", quantization="online", quantization_config=arguments)).model
        for arguments in ({"linear": "fp8_per_tensor"}, {"linear": "fp8_per_block"})
    }
    assert len(identities) == 2
