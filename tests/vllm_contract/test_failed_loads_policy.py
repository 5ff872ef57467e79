"""Requests whose KV could not be loaded are recomputed, also with vLLM's default policy, `fail`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from connectors.errors import ConfigurationError
from tests.campaigns.schedules.scheduling import Engine
from tests.vllm_contract.caches import cache_config, child, connector_config, full, vllm_config


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_only_the_policy_of_the_engine_counts(policy: Any) -> None:
    """A child cannot set it, so vLLM's MultiConnector must have it."""
    transfer = connector_config("MultiConnector", connectors=[child()])
    transfer.kv_load_failure_policy = policy
    config = vllm_config.__wrapped__(kv_transfer_config=transfer)
    refusal = pytest.raises(ConfigurationError, match="kv_load_failure_policy='recompute' for MultiConnector")
    with set_current_vllm_config(config), refusal if policy == "fail" else nullcontext():
        MultiConnector(config, KVConnectorRole.WORKER, cache_config((["layer"], full()))).shutdown()
    engine = Engine(0, 60, True, False)
    engine.close()
    assert engine.scheduler.recompute_kv_load_failures
