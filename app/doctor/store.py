"""Checks of the KV store's folders and shared memory on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from app.doctor import Finding
from configs.settings.service import ServiceSettings
from connectors.errors import ConfigurationError
from connectors.store.tiers.marker import opened_root

GIB = 2**30
STAGING_FOLDER = Path("/dev/shm")


def check_store(settings: ServiceSettings) -> Iterator[Finding]:
    store = settings.store
    if not store.enabled:
        yield Finding("store", "off: `store` has neither path nor memory_gib")
        return
    if store.path:
        yield _tier("path", Path(store.path), "disk_gib", store.disk_gib)
    if store.memory_gib:
        yield _tier("memory_path", Path(store.memory_path), "memory_gib", store.memory_gib)
    # The staging memory of one engine of each role on this machine.
    needed, free = 2 * store.staging_mib * 2**20, shutil.disk_usage(STAGING_FOLDER).free
    yield Finding(
        "store",
        f"{STAGING_FOLDER}: {free / 2**20:,.0f} MiB free; the staging of two engines needs {needed / 2**20:,.0f} MiB",
        "" if free >= needed else f"enlarge {STAGING_FOLDER}, or lower store.staging_mib",
    )


def _tier(key: str, folder: Path, budget_key: str, budget_gib: float) -> Finding:
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    try:
        if existing == folder or not existing.is_dir():
            with opened_root(folder, create=False):
                pass
        if not os.access(existing, os.W_OK | os.X_OK):
            raise ConfigurationError(f"store: this user may not write to {existing}")
        used = _bytes_below(folder)
    except (ConfigurationError, OSError) as error:
        return Finding("store", str(error), f"set store.{key} to a folder that only this user writes to")
    room = shutil.disk_usage(existing).free + used
    what = f"{folder}: {used / GIB:,.1f} GiB stored, room for {room / GIB:,.1f} GiB, store.{budget_key} {budget_gib:g}"
    return Finding(
        "store", what, "" if room >= budget_gib * GIB else f"lower store.{budget_key}, or free space in {existing}"
    )


def _bytes_below(folder: Path) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(path) / name).lstat().st_blocks * 512
            except FileNotFoundError:
                # Another process has evicted this file.
                continue
    return total
