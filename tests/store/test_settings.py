"""Settings of the store's connector, and every error with its message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from connectors.errors import ConfigurationError
from connectors.store.settings import GIB, parse_settings


def test_tiers_are_ordered_by_speed() -> None:
    settings = parse_settings({"store": {"path": "/disk", "disk_gib": 2, "memory_gib": 0.5}})
    assert settings.tiers == [
        ("memory", Path("/dev/shm/tandem-kv-store"), GIB // 2),
        ("disk", Path("/disk"), 2 * GIB),
    ]
    assert parse_settings({"store": {"path": "/disk", "memory_gib": 0}}).tiers == [("disk", Path("/disk"), 64 * GIB)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "store must be an object with at least path or memory_gib"),
        ({"store": True}, "store must be an object with at least path or memory_gib"),
        ({"store": {}}, "store has neither a path nor memory_gib; set one of them, or remove store"),
        (
            {"store": {"pth": "/disk"}},
            "unknown key store.pth; known keys are always_load, chunk_tokens, disk_gib, load_s, lookup_s, memory_gib, "
            "memory_path, path, staging_mib, store_s",
        ),
        ({"store": {"path": 3}}, "store.path must be a string, not 3"),
        ({"store": {"path": "disk"}}, "store.path must be an absolute path, not 'disk'"),
        ({"store": {"path": "/disk", "memory_path": "shm"}}, "store.memory_path must be an absolute path, not 'shm'"),
        (
            {"store": {"path": "/disk", "chunk_tokens": 2.5}},
            "store.chunk_tokens must be an integer, not 2.5",
        ),
        (
            {"store": {"path": "/disk", "chunk_tokens": True}},
            "store.chunk_tokens must be an integer, not True",
        ),
        ({"store": {"path": "/disk", "chunk_tokens": 0}}, "store.chunk_tokens must be positive, not 0"),
        ({"store": {"path": "/disk", "disk_gib": 0}}, "store.disk_gib must be positive, not 0.0"),
        ({"store": {"path": "/disk", "memory_gib": -1}}, "store.memory_gib must be positive, not -1.0"),
        (
            {"store": {"path": "/disk", "disk_gib": float("inf")}},
            "store.disk_gib must be a finite number, not inf",
        ),
        (
            {"store": {"path": "/disk", "disk_gib": 1e300}},
            "store.disk_gib must be a finite number, not 1e+300",
        ),
        (
            {"store": {"path": "/disk", "disk_gib": 10**310}},
            f"store.disk_gib must be a finite number, not {10**310}",
        ),
        (
            {"store": {"path": "/disk", "lookup_s": float("nan")}},
            "store.lookup_s must be a finite number, not nan",
        ),
        (
            {"store": {"path": "/disk", "lookup_s": "fast"}},
            "store.lookup_s must be a finite number, not 'fast'",
        ),
    ],
)
def test_errors_name_the_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_settings(given)
    assert str(raised.value) == f"kv_connector_extra_config: {message}"
