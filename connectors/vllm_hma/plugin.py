"""Register the connectors with vLLM, as entry point ``tandem`` of ``vllm.general_plugins``.

vLLM finds a connector by ``kv_connector_module_path`` or by its registered name. MultiConnector
needs the name even for a child with a module path: it rebuilds the children's statistics by class
name (vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py,
``build_kv_connector_stats``).
"""

from __future__ import annotations

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

_CONNECTORS = {
    "TandemConnector": "connectors.vllm_hma.connector",
    "TandemMultiConnector": "connectors.vllm_hma.multi_connector",
    "TandemStoreConnector": "connectors.vllm_hma.store_connector",
}


def register() -> None:
    """Register the connectors with vLLM's factory. Repeated calls have no effect.

    vLLM calls this in each of its processes when it loads plugins. ``connector.py`` and
    ``multi_connector.py`` also call it when they are imported.
    """
    for name, module in _CONNECTORS.items():
        # vLLM raises ValueError for a name that is already registered.
        with contextlib.suppress(ValueError):
            KVConnectorFactory.register_connector(name, module, name)
