"""Replicas' requests to Ray and their placement: a head and three simulated nodes with four GPUs
each.
"""

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from pydantic import SecretStr
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.engine.arguments import engine_arguments
from app.engine_deployment import bundles, deployment_options
from app.main import deploy_engine
from configs.settings.base import RoleName
from configs.settings.parsing import parse_settings
from configs.settings.service import ServiceSettings

GPUS = 4
NODES = ("a", "b", "c")
OBJECT_STORE_BYTES = 80 * 2**20

MORE = pytest.mark.skipif(
    "TANDEM_PLACEMENT" not in os.environ, reason="takes more than a minute: the campaign `placement`"
)


def settings(role: RoleName = "prefill", **role_settings: Any) -> ServiceSettings:
    return parse_settings({role: {"num_cpus": 1} | role_settings})


def test_a_rank_has_a_bundle_and_the_first_the_actor() -> None:
    """One GPU each; CPUs and custom resources are the actor's."""
    role = settings(executor="ray", num_gpus=3, tensor_parallel_size=3, resources={"fast": 1}).prefill
    assert bundles(role) == [{"CPU": 1, "GPU": 1, "fast": 1}, {"GPU": 1}, {"GPU": 1}]
    assert deployment_options(role, {})["ray_actor_options"]["num_gpus"] == 0


def test_labels_go_where_the_decision_is_made() -> None:
    """The actor has the labels, or every bundle of its placement group."""
    selector = {"x": "y"}
    alone = deployment_options(settings(label_selector=selector).prefill, {})
    assert alone["ray_actor_options"]["label_selector"] == selector
    group = deployment_options(settings(label_selector=selector, executor="ray", num_gpus=1).prefill, {})
    assert group["placement_group_bundle_label_selector"] == [selector]


@pytest.mark.parametrize(
    ("role", "backend"),
    [
        ({}, None),
        ({"num_gpus": 2, "tensor_parallel_size": 2}, None),
        ({"executor": "ray", "num_gpus": 1}, "ray"),
    ],
)
def test_vllm_is_told_which_executor(role: dict[str, Any], backend: str | None) -> None:
    """Outside a placement group, `mp` is vLLM's own choice."""
    assert engine_arguments(settings(**role), "prefill").get("distributed_executor_backend") == backend


class Idle:
    """Replacement of an engine's actor, with its options but without an engine."""

    async def __init__(self, settings: ServiceSettings, secret: SecretStr) -> None:  # type: ignore[misc]
        self._settings = settings

    async def node(self) -> str:
        return where()

    async def ranks(self) -> list[str]:
        """Return the node of a rank in each bundle of this replica's group, by vLLM's Ray
        executor's rule.
        """
        group = ray.util.get_current_placement_group()
        assert group is not None
        remote = ray.remote(num_cpus=0, num_gpus=1)(where)
        feedback = [
            PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            for index in range(len(group.bundle_specs))
        ]
        return list(await asyncio.gather(*(remote.options(scheduling_strategy=one).remote() for one in feedback)))


def where() -> str:
    """Return the name of this node: the label that the cluster below sets."""
    return str(ray.get_runtime_context().get_node_labels()["name"])


Start = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Start a head without resources, and the nodes."""
    small = {"object_store_memory": OBJECT_STORE_BYTES}
    head = {"num_cpus": 0, "labels": {"name": "head"}, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head | small)
    try:
        for name in NODES:
            cluster.add_node(num_cpus=4, num_gpus=GPUS, labels={"name": name}, **small)
        yield cluster
    finally:
        cluster.shutdown()


@contextmanager
def starting(cluster: Cluster, **variables: str) -> Iterator[Start]:
    """Run Serve with `variables` in its controller's environment; yield a function that starts a
    role.
    """
    ray.init(cluster.address, namespace="serve", log_to_driver=False, runtime_env={"env_vars": variables})
    names: list[str] = []

    def start(role: RoleName, method: str = "node", **role_settings: Any) -> list[Any]:
        names.append(f"application {len(names)}")
        parsed = settings(role, **role_settings)
        application = deploy_engine(Idle, role, parsed, SecretStr("unused by an idle one"))
        handle = serve.run(application, name=names[-1], route_prefix=None)
        answers = handle.broadcast(method).results(timeout_s=120)
        assert len(answers) == parsed.role(role).replicas
        return list(answers)

    try:
        serve.start(proxy_location="Disabled")
        yield start
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def usual(cluster: Cluster) -> Iterator[Start]:
    """Run Serve with its defaults until the end of this file. A test deletes its applications."""
    with starting(cluster) as start:
        yield start


def delete_all() -> None:
    """Free the GPUs of all applications."""
    for name in serve.status().applications:
        serve.delete(name)


TWO = {"tensor_parallel_size": 2, "num_gpus": 2, "replicas": 2}


@MORE
def test_packed_where_serve_is_told_to(cluster: Cluster) -> None:
    """Engines of half a node: prefill and decode share one, the next two another; one is free."""
    with starting(cluster, RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY="1") as start:
        first = start("prefill", **TWO | {"replicas": 1})
        assert start("decode", **TWO | {"replicas": 1}) == first
        assert len(set(start("decode", **TWO)) - set(first)) == 1


def test_spread_unless_told_otherwise(usual: Start) -> None:
    """Two engines that fit on one node are on two; none is on the head; labels decide."""
    prefill = usual("prefill", **TWO)
    assert len(set(prefill)) == 2
    apart = usual("decode", placement="apart", num_gpus=1, replicas=3)
    assert sorted(apart) == list(NODES)
    assert usual("decode", label_selector={"name": "b"}, num_gpus=1) == ["b"]
    assert "head" not in prefill
    delete_all()


@MORE
def test_ranks_of_the_ray_executor(usual: Start) -> None:
    """Four ranks share a node with room; six need one and a half. Labels apply to every rank."""
    (ranks,) = usual("prefill", "ranks", executor="ray", tensor_parallel_size=4, num_gpus=4)
    assert Counter(ranks) == {ranks[0]: 4}
    (ranks,) = usual("decode", "ranks", executor="ray", tensor_parallel_size=6, num_gpus=6)
    assert sorted(Counter(ranks).values()) == [2, 4]
    delete_all()
    selector = {"name": "c"}
    (ranks,) = usual("prefill", "ranks", executor="ray", tensor_parallel_size=2, num_gpus=2, label_selector=selector)
    assert ranks == ["c", "c"]
    delete_all()
