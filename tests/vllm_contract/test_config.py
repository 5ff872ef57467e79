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
    ("extra", "environment", "devices"),
    [
        ({}, "", ("lo",)),
        ({"side_channel_host": "10.0.0.7"}, "", ()),
        ({"devices": ["eth0", "mlx5_0:1"]}, "eth1", ("eth0", "mlx5_0:1")),
        ({}, "eth1", ()),
    ],
)
def test_devices(
    extra: dict[str, Any], environment: str, devices: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named ones first, then UCX's own environment; an engine that serves one machine needs its loopback only."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if environment:
        monkeypatch.setenv("UCX_NET_DEVICES", environment)
    assert parse_config(extra).net_devices == devices


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
        ({"devices": "eth0"}, "devices must be list"),
        ({"side_channel_host": "0.0.0.0"}, "advertise_host"),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], key: str) -> None:
    """An unknown key or a value out of range stops the start and names the key."""
    with pytest.raises(ConfigurationError, match=key):
        parse_config(extra)
