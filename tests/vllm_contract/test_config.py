"""``kv_connector_extra_config`` is checked key by key."""

from __future__ import annotations

from typing import Any

import pytest

from connectors.errors import ConfigurationError
from connectors.vllm_hma.config import parse_config


def test_defaults_serve_one_machine() -> None:
    """Without any key the side channel listens on the loopback, on a free port."""
    config = parse_config({})
    assert (config.side_channel_host, config.side_channel_port, config.reachable_host) == ("127.0.0.1", 0, "127.0.0.1")


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"lease": 3}, "lease"),
        ({"integrity": "ful"}, "integrity must be one of auto, full, off, not 'ful'"),
        ({"integrity": True}, "integrity"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": "long"}, "lease_s"),
        ({"progress_s": float("nan")}, "progress_s"),
        ({"progress_s": 4, "alive_s": 3}, "alive_s"),
        ({"side_channel_port": 70000}, "side_channel_port"),
        ({"side_channel_port": "7000"}, "side_channel_port"),
        ({"side_channel_host": 1}, "side_channel_host"),
        ({"side_channel_host": "0.0.0.0"}, "advertise_host"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], key: str) -> None:
    """An unknown key or a value out of range stops the start and names the key."""
    with pytest.raises(ConfigurationError, match=key):
        parse_config(extra)
