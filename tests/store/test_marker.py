"""The id of a tier's folder, and the folders that a tier refuses."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from connectors.errors import ConfigurationError
from connectors.store.planning.chunks import plan_store
from connectors.store.service import KVStore
from connectors.store.settings import StoreSettings
from connectors.store.tiers import folder
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.marker import MARKER
from connectors.store.tiers.staging import Staging
from connectors.vllm_hma.kv_store.opening import describe_store
from tests.campaigns.store.world import held
from tests.store.folder_objects import write
from tests.store.groups import group, sliding
from tests.store.test_service import until


def folder_id(path: Path) -> str:
    return FolderTier(path, 1 << 20).id()


@pytest.mark.parametrize("content", [None, b"", b"0123", bytes(32), b"g" * 32, b"0" * 33], ids=repr)
def test_a_folder_keeps_its_id(tmp_path: Path, content: bytes | None) -> None:
    """Engines ask at once, and find a new folder, or a marker without an id."""
    first = tmp_path / "first"
    if content is not None:
        FolderTier(first, 1 << 20)
        (first / MARKER).write_bytes(content)
    with ThreadPoolExecutor(4) as threads:
        (found,) = set(threads.map(folder_id, [first] * 4))
    assert re.fullmatch("[0-9a-f]{32}", found)
    assert folder_id(first) == found != folder_id(tmp_path / "second")


def test_engines_describe_their_store_to_routers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of 2560 and 512 bytes for 256 tokens: 12 bytes per token, 87381 tokens in 1 MiB.

    A process that keeps the lock, as one that is stopped may, delays no start.
    """
    monkeypatch.setattr(folder, "_ID_S", 0.01)
    plan, space = plan_store((group(0, 64), sliding(1, 64, 64)), 256, 4096), bytes(range(16))
    tier, staging = FolderTier(tmp_path / "tier", 1 << 20), Staging(4096, tmp_path)
    store = KVStore(plan, space, {0: 2560, 1: 512}, [tier], staging, StoreSettings())
    until(store.idle)
    described = {"id": f"{tier.id()}-000102030405060708090a0b0c0d0e0f", "tokens": 87381, "chunk_tokens": 256}
    assert describe_store(store) == described
    with held(tier.path):
        assert describe_store(store) is None
    (tier.path / MARKER).unlink()
    assert describe_store(store) is None, "routers ignore a store without an id"
    store.close()


def mode(folder: str, bits: int) -> Callable[[Path], object]:
    return lambda root: (root / folder).chmod(bits)


def owner(folder: str) -> Callable[[Path], object]:
    return lambda root: os.chown(root / folder, 4242, -1, follow_symlinks=False)


def linked(root: Path) -> None:
    (root / "parent/store/objects").rename(root / "objects")
    (root / "parent/store/objects").symlink_to(root / "objects")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (linked, "objects cannot be used: Not a directory"),
        (mode("parent/store/objects", 0o777), "objects cannot be used: all users of this host may write to it"),
        (mode("parent/store", 0o777), "all users of this host may write to it and could change stored KV"),
        (mode("parent/store", 0o2775), ""),  # as Kubernetes mounts a volume with an fsGroup
        (mode("parent", 0o2777), ""),  # as Kubernetes makes an emptyDir with an fsGroup
        (owner("parent/store/objects"), "objects cannot be used: it belongs to user 4242, who could change KV"),
        (owner("parent/store"), "it belongs to user 4242, who could change KV"),
        (owner("parent"), ""),
        (owner("link"), ""),
    ],
)
def test_a_folder_that_others_can_change_is_refused(
    tmp_path: Path, change: Callable[[Path], object], problem: str
) -> None:
    FolderTier(tmp_path / "parent/store", 1 << 20)
    (tmp_path / "link").symlink_to("parent/../parent/store")
    try:
        change(tmp_path)
    except PermissionError:
        pytest.skip("needs root")
    if problem:
        with pytest.raises(ConfigurationError, match=re.escape(problem)):
            FolderTier(tmp_path / "link", 1 << 20)
    else:
        assert write(FolderTier(tmp_path / "link", 1 << 20), 1)


def test_new_folders_are_the_owners(tmp_path: Path) -> None:
    """Whatever the umask: nobody else can put another folder in a new one's place."""
    before = os.umask(0)
    try:
        FolderTier(tmp_path / "a/b", 1 << 20)
    finally:
        os.umask(before)
    assert [oct((tmp_path / each).stat().st_mode & 0o777) for each in ("a", "a/b")] == ["0o755", "0o700"]
