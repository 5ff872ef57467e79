"""TandemConnector as a plugin, and as a child of vLLM's MultiConnector."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from connectors.codec import encode_agent_metadata
from connectors.errors import ConfigurationError
from connectors.protocol.agent_metadata import AgentMetadata
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.orders import EncodedAgentMetadata
from connectors.vllm_hma.store_connector import TandemStoreConnector
from tests.vllm_contract.caches import cache_config, child, connector_config, full, vllm_config
from tests.vllm_contract.workers import IDENTITY, layout_of

ENCODED = EncodedAgentMetadata(encode_agent_metadata(AgentMetadata("me", IDENTITY, layout_of(1 << 20), "memory", b"")))


def test_the_plugin_registers_the_connectors_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls a plugin in every process, possibly more than once. Without entry points, the
    import of a connector's module registers all: MultiConnector looks them up by name.
    """
    kinds = TandemConnector, TandemStoreConnector
    assert [KVConnectorFactory.get_connector_class_by_name(kind.__name__) for kind in kinds] == [*kinds]
    monkeypatch.setattr(KVConnectorFactory, "_registry", {})
    (entry,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "tandem")
    for _ in range(2):
        entry.load()()
    assert [KVConnectorFactory.get_connector_class_by_name(kind.__name__) for kind in kinds] == [*kinds]


def test_a_produced_request_keeps_its_blocks_without_hma(tmp_path: Path) -> None:
    """ExampleConnector lacks HMA support, so MultiConnector calls ``request_finished`` instead
    of its HMA variant.
    """
    example = child("ExampleConnector", shared_storage_path=str(tmp_path)) | {"kv_connector_module_path": None}
    transfer = connector_config("MultiConnector", connectors=[child(), example])
    config = vllm_config.__wrapped__(kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=True)
    connector = MultiConnector(config, KVConnectorRole.SCHEDULER, cache_config((["f"], full())))
    params = {"kv_transfer_params": {"do_remote_decode": True, "transfer_id": "t"}}
    asked = Request("r", list(range(10, 26)), SamplingParams(max_tokens=1, extra_args=params), None)
    try:
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): ENCODED})
        connector.on_new_request(asked)
        asked.num_computed_tokens = asked.num_prompt_tokens
        asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
        held, answer = connector.request_finished_all_groups(asked, ([1, 2],))
    finally:
        connector.shutdown()
    assert held, "the blocks are freed while decode may still fetch them"
    assert answer is not None
    assert answer["transfer_id"] == "t"


@pytest.mark.parametrize(
    ("role", "other", "refused"),
    [
        ("kv_both", child("ExampleConnector", shared_storage_path="/unused"), ""),
        ("kv_both", child("TandemStoreConnector", store={"path": "/unused"}), "one of its connectors may be Tandem's"),
        # It may report blocks that it could not fill after the step has computed KV from them.
        ("kv_both", child("LMCacheConnectorV1"), "remove LMCacheConnectorV1"),
        ("kv_producer", child("ExampleConnector", shared_storage_path="/unused"), "has kv_role kv_producer"),
    ],
)
def test_siblings_that_may_spoil_kv_are_refused(role: str, other: dict[str, Any], refused: str) -> None:
    transfer = connector_config("MultiConnector", role, connectors=[child(), other])
    transfer.kv_load_failure_policy = "recompute"
    config = vllm_config.__wrapped__(kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=True)
    refusal = pytest.raises(ConfigurationError, match=refused) if refused else nullcontext()
    with set_current_vllm_config(config), refusal:
        MultiConnector(config, KVConnectorRole.WORKER, cache_config((["f"], full()))).shutdown()
