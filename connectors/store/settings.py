"""Settings of the KV store: the ``store`` object of ``kv_connector_extra_config``."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from connectors.errors import ConfigurationError

GIB = 1 << 30

_EXPECTED: dict[type, str] = {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """Settings of the KV store.

    ``path``          folder on a local disk; engines of one model with the same folder share its
                      objects; empty: no disk tier
    ``disk_gib``      maximum total size of the files in ``path``, of all engines, in GiB
    ``memory_gib``    maximum total size of the files in ``memory_path``, of all engines, in GiB; 0:
                      no memory tier
    ``memory_path``   folder on a tmpfs; engines of one model with the same folder share its objects
    ``chunk_tokens``  tokens per chunk; ``planning/spans.py`` derives each group's objects from it
    ``staging_mib``   size of this engine's shared memory between files and KV blocks, in MiB
    ``lookup_s``      time after which an unanswered lookup is a miss, and after which a fetch ends
                      if none of its reads progresses (``tiers/reads.py``), in seconds
    ``load_s``        time from the start of a fetch after which unverified objects are not loaded,
                      in seconds
    ``store_s``       time for which a write of an object to a tier may wait for a thread, a lock or
                      evictions, in seconds; then the store drops the write
    ``always_load``   whether a prompt without a transfer loads all its stored KV; False: only if
                      the load is estimated to be faster than the computation
    """

    path: str = ""
    disk_gib: float = 64.0
    memory_gib: float = 0.0
    memory_path: str = "/dev/shm/tandem-kv-store"
    chunk_tokens: int = 256
    staging_mib: int = 256
    lookup_s: float = 0.015
    load_s: float = 2.0
    store_s: float = 30.0
    always_load: bool = False

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

    Raises ConfigurationError that names the invalid or missing key.
    """
    given = extra.get("store")
    if not isinstance(given, Mapping):
        raise ConfigurationError("kv_connector_extra_config: store must be an object with at least path or memory_gib")
    types: dict[str, type] = {field.name: type(field.default) for field in fields(StoreSettings)}
    values: dict[str, Any] = {}
    for key, value in dict[str, Any](given).items():
        if key not in types:
            raise ConfigurationError(
                f"kv_connector_extra_config: unknown key store.{key}; known keys are {', '.join(sorted(types))}"
            )
        wanted = types[key]
        if wanted is float and type(value) is int:
            with contextlib.suppress(OverflowError):
                value = float(value)
        # GIB: sizes must also be finite in bytes.
        if type(value) is not wanted or (isinstance(value, float) and not math.isfinite(value * GIB)):
            raise ConfigurationError(
                f"kv_connector_extra_config: store.{key} must be {_EXPECTED[wanted]}, not {value!r}"
            )
        values[key] = value
        if wanted not in (str, bool) and values[key] <= 0 and (key, value) != ("memory_gib", 0.0):
            raise ConfigurationError(f"kv_connector_extra_config: store.{key} must be positive, not {value!r}")
    settings = StoreSettings(**values)
    if not settings.tiers:
        raise ConfigurationError(
            "kv_connector_extra_config: store has neither a path nor memory_gib; set one of them, or remove store"
        )
    for key in ("path", "memory_path"):
        folder = getattr(settings, key)
        if folder and not Path(folder).is_absolute():
            raise ConfigurationError(f"kv_connector_extra_config: store.{key} must be an absolute path, not {folder!r}")
    return settings
