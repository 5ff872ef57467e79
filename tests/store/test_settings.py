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
    ("given", "key"),
    [
        ({}, "store"),
        ({"store": True}, "store"),
        ({"store": {}}, "store"),
        ({"store": {"pth": "/disk"}}, "store.pth: unknown key"),
        *(
            ({"store": {"path": "/disk", key: value}}, f"store.{key}")
            for key, value in (
                ("path", "disk"),
                ("memory_path", "shm"),
                ("chunk_tokens", True),
                ("chunk_tokens", "3"),
                ("disk_gib", 0),
                ("disk_gib", 1e300),
                ("staging_mib", 2**60),
                ("lookup_s", float("nan")),
            )
        ),
    ],
)
def test_errors_name_the_key(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^kv_connector_extra_config: {key}\b"):
        parse_settings(given)
