"""The store refuses models with states in vLLM's prefix cache, and names the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.request import Request

from connectors.errors import UnsupportedCacheError
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.store_connector import TandemStoreConnector
from testing.connector_state import snapshot
from tests.vllm_contract.caches import BLOCK_TOKENS, cache_config, full, vllm_config

CONNECTORS = [TandemConnector, TandemStoreConnector]


def engine(folder: Path, connector: type, store: bool, prefixes: bool) -> tuple[VllmConfig, KVCacheConfig]:
    """Return an engine's configuration and its cache: full attention and states."""
    extra: dict[str, Any] = {"store": {"path": str(folder)}} if store else {}
    config = vllm_config.__wrapped__(
        enable_prefix_caching=prefixes,
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector.__name__,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra,
        ),
    )
    # vLLM's choice for a model with states (vllm/model_executor/models/config.py).
    mode, tokens = ("align", BLOCK_TOKENS) if prefixes else ("none", config.model_config.max_model_len)
    states = MambaSpec(block_size=tokens, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode)
    cache = cache_config((["model.layers.0.self_attn.attn"], full()), (["model.layers.1.mixer"], states))
    return config, cache


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
@pytest.mark.parametrize("connector", CONNECTORS)
def test_states_in_a_prefix_cache_are_not_stored(tmp_path: Path, connector: type, role: KVConnectorRole) -> None:
    """vLLM moves the state to the step's block before the connector loads it."""
    config, cache = engine(tmp_path, connector, store=True, prefixes=True)
    with pytest.raises(UnsupportedCacheError, match=r"'model.layers.1.mixer'.*enable_prefix_caching to false"):
        connector(config, role, cache)


@pytest.mark.parametrize(("store", "prefixes"), [(True, False), (False, True)])
def test_states_without_a_store_or_without_a_prefix_cache(tmp_path: Path, store: bool, prefixes: bool) -> None:
    config, cache = engine(tmp_path, TandemConnector, store, prefixes)
    connector = TandemConnector(config, KVConnectorRole.WORKER, cache)
    assert connector.supports_divergent_local_hybrid_hits


def test_a_store_alone_is_no_part_of_a_transfer(tmp_path: Path) -> None:
    """It ignores transfers, and vLLM need not keep the outputs of preempted requests for it."""
    config, cache = engine(tmp_path, TandemStoreConnector, store=True, prefixes=False)
    connector = TandemStoreConnector(config, KVConnectorRole.SCHEDULER, cache)
    assert not connector.requires_kv_delivery
    assert not connector.supports_divergent_local_hybrid_hits
    params = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_host": "h", "remote_port": 1}
    asked = {"do_remote_decode": True, "transfer_id": "t", "describe": True}
    for each in (params, asked):
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": each | {"transfer_id": "t"}})
        request = Request("r", [1, 2, 3], sampling, None, prompt_embeds=torch.zeros(3, 4))
        connector.on_new_request(request)
        assert connector.get_num_new_matched_tokens(request, 0) == (0, False)
        assert connector.request_finished_all_groups(request, ([1],)) == (False, None)
    assert not snapshot(connector.scheduler).has_orders
