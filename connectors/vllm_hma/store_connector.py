"""The KV store as a KV connector of its own, for an engine without prefill/decode disaggregation.

KVTransferConfig(
    kv_connector="TandemStoreConnector",
    kv_connector_module_path="connectors.vllm_hma.store_connector",
    kv_role="kv_both",
    kv_connector_extra_config={"store": {"path": "/mnt/nvme/tandem"}},  # store/settings.py
)
"""

from __future__ import annotations

from connectors.vllm_hma.connector import TandemConnector


class TandemStoreConnector(TandemConnector):
    """TandemConnector without transfers, NIXL agent and side channel."""

    transfers = False
