"""The id of an engine's KV store, by which routers know that engines share it."""

import asyncio
import logging
from pathlib import Path

from configs.settings.kv import KVStoreSettings
from connectors.store.tiers.marker import folder_id

logger = logging.getLogger(__name__)

READ_S = 5.0
"""Longest time to read the id; a disk may hang."""


async def store_id(store: KVStoreSettings) -> str | None:
    """Return the id of the slowest tier, once the engine has created it.

    None without a store, or if the id cannot be read; routers then know nothing of the store.
    """
    if not store.enabled:
        return None
    folder = store.path or store.memory_path
    try:
        async with asyncio.timeout(READ_S):
            return await asyncio.to_thread(folder_id, Path(folder))
    except (OSError, TimeoutError) as error:
        logger.warning("cannot read the id of the KV store in %s, so routing ignores the store: %r", folder, error)
        return None
