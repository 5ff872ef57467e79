"""Prepare vLLM's processes for the connectors: entry point ``tandem`` of its general plugins.

vLLM finds a connector by ``kv_connector_module_path`` or by its registered name. MultiConnector
needs the name even for a child with a module path: it rebuilds the children's statistics by class
name (vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py,
``build_kv_connector_stats``).
"""

from __future__ import annotations

import contextlib

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from connectors.logs import log_with_vllm
from connectors.open_files import raise_limit
from connectors.vllm_hma.upstream.vllm_media_names import mark_names_of_clients

_CONNECTORS = {
    "TandemConnector": "connectors.vllm_hma.connector",
    "TandemMultiConnector": "connectors.vllm_hma.multi_connector",
    "TandemStoreConnector": "connectors.vllm_hma.store_connector",
}


def register() -> None:
    """Register the connectors with vLLM's factory, and mark the names that clients give to images.
    Repeated calls have no effect. vLLM calls this in each of its processes, also of engines without
    a connector of Tandem.
    """
    mark_names_of_clients()
    for name, module in _CONNECTORS.items():
        # vLLM raises ValueError for a name that is already registered.
        with contextlib.suppress(ValueError):
            KVConnectorFactory.register_connector(name, module, name)


def prepare_process() -> None:
    """Prepare a process that uses a connector, at its module's import. Idempotent."""
    register()
    log_with_vllm()
    raise_limit()
