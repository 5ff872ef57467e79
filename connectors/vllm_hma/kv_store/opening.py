"""Open an engine's KV store with the layouts of all its ranks, and describe it for routers."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from typing import Any

from connectors.errors import ConfigurationError, StoreError
from connectors.store.keys.names import namespace
from connectors.store.planning.chunks import plan_store
from connectors.store.planning.layout import object_bytes, prove_store
from connectors.store.service import KVStore
from connectors.store.settings import StoreSettings
from connectors.store.tiers.folder import FolderTier
from connectors.store.tiers.staging import Staging, slot_bytes
from connectors.vllm_hma.kv_store.orders import RankCache

logger = logging.getLogger(__name__)


def open_store(settings: StoreSettings, max_model_len: int, rank_caches: Sequence[RankCache]) -> KVStore:
    """Raises ConfigurationError, and PlanError and CoverError as ``prove_store``."""
    if len({rank_cache.model for rank_cache in rank_caches}) > 1:
        raise ConfigurationError(
            "store: the engine's ranks report different models (weights, configuration, image processor files, "
            "dtype or vLLM version); make the model's files equal on all hosts, and restart the engine"
        )
    plan = plan_store(rank_caches[0].layout.groups, settings.chunk_tokens, max_model_len)
    layout = prove_store(plan, [rank_cache.layout for rank_cache in rank_caches])
    space = namespace(rank_caches[0].model, plan, layout)
    sizes = dict(zip((each.index for each in plan.stored), object_bytes(layout), strict=True))
    tiers = [
        FolderTier(folder, budget, durable=label == "disk", label=label) for label, folder, budget in settings.tiers
    ]
    check_sizes(sizes.values(), settings)
    logger.info(
        "Tandem: KV store with namespace %s and chunks of %d tokens in %s",
        space.hex(),
        plan.chunk_tokens,
        ", ".join(str(tier.path) for tier in tiers),
    )
    return KVStore(plan, space, sizes, tiers, Staging(settings.staging_mib << 20), settings)


def check_sizes(sizes: Collection[int], settings: StoreSettings) -> None:
    """Raise ConfigurationError if staging or all tiers are too small for the objects of one chunk.

    A step may complete the objects of all groups together. Stores use at most half of staging,
    except for a single object (``KVStore.reserve``).
    """
    chunk_bytes = sum(sizes)
    needed_bytes = sum(map(slot_bytes, sizes)) * (2 if len(sizes) > 1 else 1)
    if needed_bytes > settings.staging_mib << 20:
        half = ", and stores use at most half of staging" if len(sizes) > 1 else ""
        raise ConfigurationError(
            f"store.staging_mib: {settings.staging_mib} MiB of staging are too small: the objects of one chunk have "
            f"{chunk_bytes:,} bytes{half}; set it to at least {-(-needed_bytes >> 20)}, or reduce store.chunk_tokens"
        )
    if all(chunk_bytes > budget for _, _, budget in settings.tiers):
        raise ConfigurationError(
            f"store: the objects of one chunk have {chunk_bytes:,} bytes, more than each tier; increase disk_gib or "
            "memory_gib, or reduce chunk_tokens"
        )


def describe_store(store: KVStore) -> dict[str, Any] | None:
    """Return the ``EngineStore`` (``actors/policy/prefixes.py``) of the slowest, largest tier."""
    slowest = store.tiers[-1].folder
    try:
        folder = slowest.id()
    except (StoreError, OSError) as error:
        logger.warning(
            "Tandem: cannot read the id of the KV store in %s, so routers ignore the store: %s", slowest.path, error
        )
        return None
    chunk_tokens = store.plan.chunk_tokens
    return {
        "id": f"{folder}-{store.space.hex()}",
        "tokens": slowest.budget_bytes * chunk_tokens // sum(store.sizes.values()),
        "chunk_tokens": chunk_tokens,
    }
