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
            "store.pth: unknown key; known keys are always_load, chunk_tokens, disk_gib, load_s, lookup_s, memory_gib, "
            "memory_path, path, staging_mib, store_s",
        ),
        ({"store": {"path": "disk"}}, "store.path: must be an absolute path, not 'disk'"),
        *(
            ({"store": {"path": "/disk", key: value}}, f"store.{key}: ")
            for key, value in (
                ("path", 3),
                ("memory_path", "shm"),
                ("chunk_tokens", 2.5),
                ("chunk_tokens", True),
                ("chunk_tokens", "3"),
                ("chunk_tokens", 0),
                ("disk_gib", 0),
                ("memory_gib", -1),
                ("disk_gib", float("inf")),
                ("disk_gib", 1e300),
                ("disk_gib", 10**310),
                ("staging_mib", 0),
                ("staging_mib", 2**60),
                ("lookup_s", float("nan")),
                ("lookup_s", "fast"),
            )
        ),
    ],
)
def test_errors_name_the_key(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_settings(given)
    assert str(raised.value).startswith(f"kv_connector_extra_config: {message}")


def test_an_integer_is_a_number() -> None:
    assert parse_settings({"store": {"path": "/disk", "disk_gib": 2, "load_s": 3}}).load_s == 3.0
