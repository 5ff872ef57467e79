"""TandemConnector as a child of vLLM's MultiConnector, and its registration as a vLLM plugin."""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import SamplingParams
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.request import Request, RequestStatus

from connectors.codec import encode_agent_metadata
from connectors.protocol.agent_metadata import AgentMetadata
from connectors.vllm_hma.connector import TandemConnector
from connectors.vllm_hma.metrics import TandemStats
from connectors.vllm_hma.orders import EncodedAgentMetadata
from tests.vllm_contract.caches import BLOCK_TOKENS, cache_config, full, vllm_config
from tests.vllm_contract.workers import IDENTITY, layout_of

NAME = "TandemConnector"
ROOT = Path(__file__).resolve().parents[2]


def multi_config(folder: Path, **tandem: Any) -> VllmConfig:
    """Return the demo model's configuration with MultiConnector over TandemConnector and
    ExampleConnector.
    """
    children = [
        {
            "kv_connector": NAME,
            "kv_connector_module_path": "connectors.vllm_hma.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
        | tandem,
        {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(folder)},
        },
    ]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"connectors": children},
    )
    return vllm_config.__wrapped__(kv_transfer_config=transfer, disable_hybrid_kv_cache_manager=True)


def entry_point() -> Callable[[], None]:
    """Return the function that ``vllm.general_plugins`` of pyproject.toml names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["tandem"].partition(":")
    loaded: Callable[[], None] = getattr(importlib.import_module(module), function)
    return loaded


def test_the_plugin_registers_the_connector_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls a plugin in every process, possibly more than once; afterwards no module path
    is needed.
    """
    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))  # noqa: SLF001 (vLLM has no unregister)
    KVConnectorFactory._registry.pop(NAME, None)  # noqa: SLF001
    register = entry_point()
    register()
    register()
    found = KVConnectorFactory.get_connector_class(KVTransferConfig(kv_connector=NAME, kv_role="kv_both"))
    assert found is TandemConnector


def test_importing_the_module_registers_the_connector() -> None:
    """Without entry points, vLLM loads the class by module path; MultiConnector then looks it up
    by name.
    """
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is TandemConnector


@pytest.fixture
def unregistered() -> Iterator[None]:
    """Leave Prometheus' registry unchanged."""
    unregister_vllm_metrics()
    known = set(REGISTRY._collector_to_names)  # noqa: SLF001 (no public list of collectors)
    yield
    for collector in set(REGISTRY._collector_to_names) - known:  # noqa: SLF001
        REGISTRY.unregister(collector)


@pytest.mark.usefixtures("unregistered")
def test_statistics_pass_through_multi_connector(tmp_path: Path) -> None:
    """Stats of ranks reach the log line and ``/metrics`` by the child's name, as vLLM carries
    them.
    """
    config = multi_config(tmp_path)
    stats = TandemStats()
    stats.count("requests", "sent", 3)
    carried = msgspec.msgpack.decode(msgspec.msgpack.encode({NAME: stats.to_dict()}))
    log = KVConnectorLogging(config.kv_transfer_config)
    log.observe(carried)
    assert not log.transfer_stats_accumulator.is_empty()
    types: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    metrics = MultiConnector.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})
    metrics.observe(carried)
    labels = {"model_name": "m", "engine": "0", "outcome": "sent"}
    assert REGISTRY.get_sample_value("vllm:tandem_kv_requests_total", labels) == 3


def test_a_produced_request_keeps_its_blocks_without_hma(tmp_path: Path) -> None:
    """ExampleConnector lacks HMA support, so MultiConnector calls ``request_finished`` instead
    of its HMA variant.
    """
    config = multi_config(tmp_path)
    cache = cache_config((["f"], full()))
    connector = MultiConnector(config, KVConnectorRole.SCHEDULER, cache)
    try:
        agent_metadata = encode_agent_metadata(AgentMetadata("me", IDENTITY, layout_of(1 << 20), "memory", b""))
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): EncodedAgentMetadata(agent_metadata)})
        params = {"do_remote_decode": True, "transfer_id": "t"}
        sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
        request = Request("r", list(range(10, 10 + BLOCK_TOKENS)), sampling, None)
        connector.on_new_request(request)
        request.num_computed_tokens = request.num_prompt_tokens
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        held, answer = connector.request_finished_all_groups(request, ([1, 2],))
        assert held, "the blocks are freed while decode may still fetch them"
        assert answer is not None
        assert answer["transfer_id"] == "t"
    finally:
        connector.shutdown()
