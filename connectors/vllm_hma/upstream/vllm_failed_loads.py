"""Make vLLM recompute a request whose KV could not be loaded, also with its default policy, `fail`.

vLLM's scheduler reads the policy after it has created the connector. Source:
https://github.com/vllm-project/vllm/blob/v0.32.0/vllm/v1/core/sched/scheduler.py
"""

from __future__ import annotations

import logging

from vllm.config import KVTransferConfig, get_current_vllm_config_or_none

from connectors.errors import ConfigurationError

logger = logging.getLogger(__name__)


def recompute_failed_loads(transfer: KVTransferConfig) -> None:
    """Set the policy in a connector's configuration.

    The children of vLLM's MultiConnector have configurations of their own, which the scheduler does
    not read. Raises ConfigurationError if the engine's says `fail`; known on the worker side only.
    """
    if transfer.kv_load_failure_policy != "recompute":
        logger.info("requests whose KV cannot be loaded are recomputed (kv_load_failure_policy)")
        transfer.kv_load_failure_policy = "recompute"
    config = get_current_vllm_config_or_none()
    engine = None if config is None else config.kv_transfer_config
    if engine is not None and engine.kv_load_failure_policy != "recompute":
        raise ConfigurationError(
            f"kv_transfer_config: set kv_load_failure_policy='recompute' for {engine.kv_connector}; with vLLM's "
            "default, 'fail', a failed load of KV fails the request"
        )
