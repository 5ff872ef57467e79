"""Settings of the KV store: ``store`` in a service's configuration and in a connector's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from connectors.errors import ConfigurationError
from connectors.settings import Seconds, Settings, parse

GIB = 1 << 30

# In bytes, a larger size would exceed 64 bits.
Gib = Annotated[float, Field(le=2**33, allow_inf_nan=False)]


class StoreSettings(Settings):
    """Settings of the KV store, which is disabled unless `path` or `memory_gib` is set."""

    path: str = Field(
        "", description="folder on a local disk of each engine's node, for the store alone; empty: no disk tier"
    )
    disk_gib: Gib = Field(
        64.0,
        gt=0,
        description="maximum size of all files below `path`, in GiB, shared by all engines that use this folder",
    )
    memory_gib: Gib = Field(
        0.0,
        ge=0,
        description="maximum size of all files below `memory_path`, in GiB, shared by all engines that use this "
        "folder; 0: no memory tier",
    )
    memory_path: str = Field("/dev/shm/tandem-kv-store", description="folder on a tmpfs that holds the memory tier")
    chunk_tokens: int = Field(
        256,
        ge=1,
        description="tokens of a chunk, equal on all engines that share objects. For a model with states, set "
        "`max_num_batched_tokens` or `long_prefill_token_threshold` to the same value",
    )
    staging_mib: int = Field(
        256,
        ge=1,
        le=2**20,
        description="shared memory of each engine between files and KV blocks, in `/dev/shm`: at least the objects "
        "of one chunk, twice that with several KV cache groups",
    )
    lookup_s: Seconds = Field(
        0.015,
        description="time after which a lookup without an answer counts as a miss, and after which a fetch ends if the "
        "tiers deliver no bytes to it",
    )
    load_s: Seconds = Field(
        2.0,
        description="timeout for reading and verifying the objects of a request; the engine computes the tokens of "
        "late ones",
    )
    store_s: Seconds = Field(
        30.0,
        description="time for which an object may wait in staging until its write to a tier begins; then the store "
        "drops it",
    )
    always_load: bool = Field(
        False,
        description="whether a prompt without a transfer loads all its stored KV, which saves computation; false: only "
        "if the load is estimated to be faster than the computation",
    )

    @field_validator("path", "memory_path")
    @classmethod
    def _is_absolute(cls, folder: str) -> str:
        if folder and not Path(folder).is_absolute():
            raise ValueError(f"must be an absolute path, not {folder!r}")
        return folder

    @property
    def enabled(self) -> bool:
        return bool(self.path or self.memory_gib)

    @property
    def tiers(self) -> list[tuple[str, Path, int]]:
        """(label, folder, budget in bytes) of each tier, fastest first."""
        found = []
        if self.memory_gib:
            found.append(("memory", Path(self.memory_path), int(self.memory_gib * GIB)))
        if self.path:
            found.append(("disk", Path(self.path), int(self.disk_gib * GIB)))
        return found


def parse_settings(extra: Mapping[str, Any]) -> StoreSettings:
    """Parse the ``store`` object of ``kv_connector_extra_config``.

    Raises ConfigurationError that names each invalid key, also if the store is disabled.
    """
    given = extra.get("store")
    if not isinstance(given, Mapping):
        raise ConfigurationError("kv_connector_extra_config: store must be an object with at least path or memory_gib")
    settings = parse(StoreSettings, given, "store.")
    if not settings.enabled:
        raise ConfigurationError(
            "kv_connector_extra_config: store has neither a path nor memory_gib; set one of them, or remove store"
        )
    return settings
