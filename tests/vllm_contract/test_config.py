"""``kv_connector_extra_config`` is checked key by key."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from connectors.errors import ConfigurationError
from connectors.protocol.limits import TransferLimits
from connectors.vllm_hma import config as config_module
from connectors.vllm_hma.config import parse_config, with_port_of_rank
from connectors.vllm_hma.devices import has_rdma, interface_of, rdma_ports


def test_defaults_serve_one_machine() -> None:
    config = parse_config({})
    assert (config.side_channel_host, config.side_channel_port, config.reachable_host) == ("127.0.0.1", 0, "127.0.0.1")


@pytest.mark.parametrize(
    ("extra", "key"),
    [
        ({"lease": 3}, "lease"),
        ({"integrity": "ful"}, "integrity: Input should be 'auto', 'full' or 'off' .got 'ful'"),
        ({"integrity": True}, "integrity"),
        ({"progress_s": 4, "alive_s": 3}, "alive_s"),
        ({"side_channel_port": 70000}, "side_channel_port"),
        ({"side_channel_port": "7000"}, "side_channel_port"),
        ({"side_channel_host": 1}, "side_channel_host"),
        ({"devices": "eth0"}, "devices: Input should be a valid list"),
        ({"side_channel_host": "0.0.0.0"}, "advertise_host"),
        ({"supervisor": "short"}, "supervisor must have at least 16 characters"),
        ({"forget_s": 60}, "forget_s: Input should be greater than or equal to 1800"),
        ({"store": True}, "store must be an object"),
        ({"store": {"path": "/disk", "always_load": 1}}, "store.always_load: "),
    ],
)
def test_what_is_wrong_is_named(extra: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigurationError, match=key):
        parse_config(extra)


@pytest.mark.parametrize("field", [each.name for each in fields(TransferLimits)])
@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), True, "5", None])
def test_deadlines_are_positive_seconds(field: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"kv_connector_extra_config: {field}: "):
        parse_config({field: value})


RDMA = ("mlx5_0:1",)


@pytest.mark.parametrize(
    ("extra", "environment", "rdma", "devices"),
    [
        ({}, "", (), ("lo",)),
        ({}, "", RDMA, ("lo", *RDMA)),  # CUDA IPC may not reach from one GPU to the other
        ({}, "eth1", RDMA, ()),
        ({"devices": ["eth0", "mlx5_0:1"]}, "eth1", (), ("eth0", "mlx5_0:1")),
        ({"side_channel_host": "10.0.0.7"}, "", (), ("eth0",)),
        ({"side_channel_host": "0.0.0.0", "advertise_host": "10.0.0.7"}, "", (), ("eth0",)),
        ({"side_channel_host": "10.0.0.7"}, "", RDMA, ()),  # UCX uses all of them
        ({"side_channel_host": "10.0.0.8"}, "", (), ()),
        ({"side_channel_host": "127.example.com"}, "", (), ()),
    ],
)
def test_devices(
    extra: dict[str, Any],
    environment: str,
    rdma: tuple[str, ...],
    devices: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Named devices first, then UCX's environment; an engine for one machine uses its loopback.
    Others use the side channel's interface, not transient ones.
    """
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    for name, answer in (("rdma_ports", rdma), ("has_rdma", bool(rdma))):
        monkeypatch.setattr(config_module, name, lambda answer=answer: answer)
    monkeypatch.setattr(config_module, "interface_of", {"10.0.0.7": "eth0"}.get)
    if environment:
        monkeypatch.setenv("UCX_NET_DEVICES", environment)
    assert parse_config(extra).net_devices == devices


def test_active_rdma_ports(tmp_path: Path) -> None:
    """Ports that are down are left out."""
    for port, state in (("mlx5_0/ports/1", "4: ACTIVE"), ("mlx5_0/ports/2", "1: DOWN"), ("mlx5_1/ports/1", "2: INIT")):
        folder = tmp_path / "infiniband" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
    assert rdma_ports(tmp_path / "infiniband", tmp_path / "not in this container") == ()
    assert rdma_ports(tmp_path / "infiniband", tmp_path) == RDMA
    assert has_rdma(tmp_path / "infiniband")
    assert not has_rdma(tmp_path / "none")


def test_addresses_and_interfaces() -> None:
    """Names and other hosts' addresses have no interface."""
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.7") is interface_of("localhost") is None


def test_each_data_parallel_rank_has_its_own_port() -> None:
    """A fixed port is that of rank 0; with 0, each rank takes a free one."""
    fixed, free = parse_config({"side_channel_port": 5600}), parse_config({})
    assert [with_port_of_rank(fixed, rank).side_channel_port for rank in range(3)] == [5600, 5601, 5602]
    assert with_port_of_rank(free, 2) == free
    with pytest.raises(ConfigurationError, match="rank 1 would listen on port 65536"):
        with_port_of_rank(parse_config({"side_channel_port": 65535}), 1)


def test_with_a_secret_an_engine_of_a_ray_cluster_listens_on_the_nodes_address() -> None:
    program = """
import ray
ray.init(address="local", num_cpus=0, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.2")
from connectors.vllm_hma import config as config_module
from connectors.vllm_hma.config import parse_config
for more in ({}, {"side_channel_host": "127.0.0.3"}):
    print(*(parse_config(more | {"secret": secret}).reachable_host for secret in ("", "s" * 16)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-4:] == ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.3"]
