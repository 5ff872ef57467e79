"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import VllmConfig
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from connectors.store.tiers.staging import Staging
from testing.memory_transport import Fabric
from tests.vllm_contract.caches import connector_config
from tests.vllm_contract.stored_prompt import Host
from tests.vllm_contract.workers import SHORT, Worker


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    fabric = Fabric()
    made: list[Worker] = []

    def make(name: str, **overrides: Any) -> Worker:
        made.append(Worker(fabric, name, **overrides))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def impatient(worker: Callable[..., Worker]) -> Callable[..., Worker]:
    return partial(worker, limits=SHORT)


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    made = Staging(1 << 20, tmp_path)
    yield made
    made.close()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made = Host(tmp_path / "store")
    yield made
    for scheduler in made.schedulers:
        scheduler.close()


def collectors() -> set[Any]:
    return set(REGISTRY._collector_to_names)  # noqa: SLF001 - prometheus_client lists samples only


def build(kind: Any, **extra: Any) -> Any:
    types: dict[Any, Any] = {Counter: Counter, Gauge: Gauge, Histogram: Histogram}
    config = VllmConfig(kv_transfer_config=connector_config(kind.__name__, **extra))
    return kind.build_prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"]})


@pytest.fixture
def registered() -> Iterator[Callable[..., Any]]:
    unregister_vllm_metrics()  # metrics of an engine that other tests started in this process
    known = collectors()
    yield build
    for collector in collectors() - known:
        REGISTRY.unregister(collector)
