"""Requests whose KV could not be loaded are recomputed, also with vLLM's default policy, `fail`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from connectors.errors import ConfigurationError
from connectors.vllm_hma.multi_connector import TandemMultiConnector
from tests.campaigns.schedules.scheduling import Engine
from tests.vllm_contract.caches import cache_config, child, connector_config, full, vllm_config


@pytest.mark.parametrize("kind", [MultiConnector, TandemMultiConnector])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_only_the_policy_of_the_engine_counts(kind: Any, policy: Any) -> None:
    """A child cannot set it, so vLLM's MultiConnector must have it; Tandem's sets it itself."""
    transfer = connector_config(kind.__name__, connectors=[child()])
    transfer.kv_load_failure_policy = policy
    config = vllm_config.__wrapped__(kv_transfer_config=transfer)
    refused = kind is MultiConnector and policy == "fail"
    refusal = pytest.raises(ConfigurationError, match="kv_load_failure_policy='recompute'")
    with set_current_vllm_config(config), refusal if refused else nullcontext():
        kind(config, KVConnectorRole.WORKER, cache_config((["layer"], full()))).shutdown()
        assert transfer.kv_load_failure_policy == "recompute"
    engine = Engine(0, 60, True, False)
    engine.close()
    assert engine.scheduler.recompute_kv_load_failures
