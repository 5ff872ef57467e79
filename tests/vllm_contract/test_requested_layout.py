"""The KV cache layout that the connector requests, resolved by vLLM's own function."""

from __future__ import annotations

import pytest
from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

from tests.vllm_contract.caches import vllm_config

ANY = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC"]
"""vLLM's order of preference for backends without one (vllm/v1/attention/backends/utils.py)."""


def config() -> VllmConfig:
    transfer = KVTransferConfig(
        kv_connector="TandemConnector",
        kv_connector_module_path="connectors.vllm_hma.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
    )
    made: VllmConfig = vllm_config.__wrapped__(kv_transfer_config=transfer)
    return made


def test_head_major_is_requested() -> None:
    """vLLM's default is token-major: with unequal TP sizes each token's share of heads would be
    a separate run.
    """
    assert resolve_kv_cache_layout(config(), [ANY]).name == "LBHNC"


def test_mla_keeps_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLA has one head, so its pages are equal in both layouts."""
    made = config()
    monkeypatch.setattr(type(made.model_config), "use_mla", True)
    assert resolve_kv_cache_layout(made, [ANY]).name == "LBNHC"


def test_a_backend_that_knows_one_layout_keeps_it() -> None:
    """CPU attention is always head-major; for other backends, vLLM drops the request with a
    warning.
    """
    cpu = [layout.name for layout in CPUAttentionBackend.supported_kv_cache_layouts()]
    assert cpu == ["LBHNC"]
    assert resolve_kv_cache_layout(config(), [cpu]).name == "LBHNC"
    assert resolve_kv_cache_layout(config(), [["LBNHC"]]).name == "LBNHC"
