"""The id of the KV store that an engine announces."""

import asyncio
import threading

from actors.engine.startup import store_id as module
from actors.engine.startup.store_id import store_id
from configs.settings.kv import KVStoreSettings
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.marker import folder_id


def test_the_slowest_tier_is_announced(tmp_path):
    """Disk outlives the host's memory; without a disk it is the memory."""
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    for folder in (disk, memory):
        FolderTier(folder, 1 << 20).close()
    both = KVStoreSettings(path=str(disk), memory_gib=1, memory_path=str(memory))
    assert asyncio.run(store_id(both)) == folder_id(disk)
    assert asyncio.run(store_id(both.model_copy(update={"path": ""}))) == folder_id(memory)


def test_an_engine_without_a_readable_store_announces_none(tmp_path):
    assert asyncio.run(store_id(KVStoreSettings())) is None
    assert asyncio.run(store_id(KVStoreSettings(path=str(tmp_path / "missing")))) is None


def test_a_disk_that_hangs_does_not_delay_the_start(tmp_path, monkeypatch):
    release = threading.Event()

    def hang(path) -> str:
        release.wait(60)
        return "late"

    async def asked() -> str | None:
        try:
            return await store_id(KVStoreSettings(path=str(tmp_path)))
        finally:
            release.set()  # the event loop waits for its threads when it closes

    monkeypatch.setattr(module, "READ_S", 0.05)
    monkeypatch.setattr(module, "folder_id", hang)
    assert asyncio.run(asked()) is None
