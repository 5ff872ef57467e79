"""Registers TandemConnector with vLLM, as entry point ``tandem`` of ``vllm.general_plugins``.

vLLM finds a connector by ``kv_connector_module_path`` or by its registered name. MultiConnector
needs the name even for a child with a module path: it rebuilds the children's statistics by class
name (vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py,
``build_kv_connector_stats``).
"""

from __future__ import annotations

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def register() -> None:
    """Register the connector. vLLM calls this in every process; repeated calls have no effect."""
    # vLLM raises ValueError for a name that is already registered.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector("TandemConnector", "connectors.vllm_hma.connector", "TandemConnector")
