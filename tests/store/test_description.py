"""What an engine tells routers about its KV store."""

from __future__ import annotations

from pathlib import Path

from connectors.store.planning.spans import plan_store
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.marker import MARKER
from connectors.vllm_hma.kv_store.description import describe_store
from tests.store.groups import group, sliding

SPACE = bytes(range(16))


def test_id_and_capacity_by_hand(tmp_path: Path) -> None:
    """Objects of 2560 and 512 bytes for 256 tokens: 12 bytes per token, 87381 tokens in 1 MiB."""
    tier = FolderTier(tmp_path / "tier", 1 << 20)
    plan = plan_store((group(0, 64), sliding(1, 64, 64)), 256, 4096)
    described = describe_store(tier, SPACE, plan, {0: 2560, 1: 512})
    expected_id = f"{tier.id()}-000102030405060708090a0b0c0d0e0f"
    assert described == {"id": expected_id, "tokens": 87381, "chunk_tokens": 256}
    tier.close()


def test_another_model_in_the_same_folder_has_another_id(tmp_path: Path) -> None:
    tier = FolderTier(tmp_path / "tier", 1 << 20)
    plan = plan_store((group(0, 64),), 256, 4096)
    one, other = (describe_store(tier, space, plan, {0: 2560}) for space in (SPACE, SPACE[::-1]))
    assert one is not None
    assert other is not None
    assert one["id"] != other["id"]
    tier.close()


def test_a_folder_without_a_readable_marker_is_not_described(tmp_path: Path) -> None:
    """The store works without an id; routers then ignore it."""
    tier = FolderTier(tmp_path / "tier", 1 << 20)
    (tier.path / MARKER).unlink()
    assert describe_store(tier, SPACE, plan_store((group(0, 64),), 256, 4096), {0: 2560}) is None
    tier.close()
