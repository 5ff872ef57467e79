"""Requests whose KV could not be loaded are recomputed, also with vLLM's default policy, `fail`."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from connectors.errors import ConfigurationError
from connectors.vllm_hma.multi_connector import TandemMultiConnector
from tests.campaigns.schedules.scheduling import Engine
from tests.vllm_contract.caches import cache_config, child, full, vllm_config


def test_the_scheduler_recomputes() -> None:
    engine = Engine(0, 60, True, False)
    try:
        assert engine.scheduler.recompute_kv_load_failures
    finally:
        engine.close()


@pytest.mark.parametrize("kind", [MultiConnector, TandemMultiConnector])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_only_the_policy_of_the_engine_counts(kind: Any, policy: Any) -> None:
    """A child cannot set it, so vLLM's MultiConnector must have it; Tandem's sets it itself."""
    transfer = KVTransferConfig(
        kv_connector=kind.__name__,
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"connectors": [child()]},
    )
    config = vllm_config.__wrapped__(kv_transfer_config=transfer)

    def make() -> None:
        with set_current_vllm_config(config):
            kind(config, KVConnectorRole.WORKER, cache_config((["layer"], full()))).shutdown()

    if kind is MultiConnector and policy == "fail":
        with pytest.raises(ConfigurationError, match="kv_load_failure_policy='recompute' for MultiConnector"):
            make()
    else:
        make()
        assert transfer.kv_load_failure_policy == "recompute"


def test_with_a_secret_an_engine_of_a_ray_cluster_listens_on_the_nodes_address() -> None:
    program = """
import ray
ray.init(address="local", num_cpus=0, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.2")
from connectors.vllm_hma.config import parse_config
for more in ({}, {"side_channel_host": "127.0.0.3"}):
    print(*(parse_config(more | {"secret": secret}).reachable_host for secret in ("", "s" * 16)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-4:] == ["127.0.0.1", "127.0.0.2", "127.0.0.3", "127.0.0.3"]
