"""Check that staging and the tiers have room for the objects of a chunk."""

from __future__ import annotations

from collections.abc import Collection

from connectors.errors import ConfigurationError
from connectors.store.settings import StoreSettings
from connectors.store.tiers.staging import slot_bytes


def check_sizes(sizes: Collection[int], settings: StoreSettings) -> None:
    """Raise ConfigurationError if staging or all tiers are too small for the objects of one chunk.

    A step may complete the objects of all groups together. Stores use at most half of staging,
    except for a single object (``ObjectWriter.reserve``).

    ``sizes``  payload bytes of one object, for each group that has objects
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
