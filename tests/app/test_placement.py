"""What replicas ask Ray for, and where it then puts them: a head and three nodes with four GPUs each, none real."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.arguments import engine_arguments
from app.main import deploy_engine
from app.placement import bundles, placed
from configs.settings import RoleName, ServiceSettings, SettingsError, parse_settings

GPUS = 4
NODES = ("a", "b", "c")


def settings(role: RoleName = "prefill", **role_settings: Any) -> ServiceSettings:
    return parse_settings({role: {"num_cpus": 1} | role_settings})


@pytest.mark.parametrize(
    ("role", "group"),
    [
        ({}, []),
        ({"placement": "apart", "num_gpus": 2, "tensor_parallel_size": 2}, []),
        ({"placement": "packed"}, [{"CPU": 1}]),
        ({"placement": "packed", "num_gpus": 2, "tensor_parallel_size": 2}, [{"CPU": 1, "GPU": 2}]),
        ({"executor": "ray", "num_gpus": 1}, [{"CPU": 1, "GPU": 1}]),
        (
            {"executor": "ray", "num_gpus": 3, "tensor_parallel_size": 3, "resources": {"fast": 1}},
            [{"CPU": 1, "GPU": 1, "fast": 1}, {"GPU": 1}, {"GPU": 1}],
        ),
    ],
)
def test_bundles(role: dict[str, Any], group: list[dict[str, float]]) -> None:
    """A group only where a single actor would not do; the first bundle holds what the actor asks for."""
    assert bundles(settings(**role).prefill) == group


def test_labels_go_where_the_decision_is_made() -> None:
    """On the actor, or on every bundle of its group."""
    alone = placed(settings(label_selector={"x": "y"}).prefill, {})
    assert alone["ray_actor_options"]["label_selector"] == {"x": "y"}
    group = placed(settings(label_selector={"x": "y"}, placement="packed").prefill, {})
    assert group["placement_group_bundle_label_selector"] == [{"x": "y"}]
    assert "label_selector" not in group["ray_actor_options"]


@pytest.mark.parametrize(
    ("role", "backend"),
    [
        ({}, None),
        ({"placement": "packed", "num_gpus": 2, "tensor_parallel_size": 2}, "mp"),
        ({"executor": "ray", "num_gpus": 1}, "ray"),
    ],
)
def test_vllm_is_told_which_executor(role: dict[str, Any], backend: str | None) -> None:
    """In a placement group it would take `ray` by itself."""
    assert engine_arguments(settings(**role), "prefill").get("distributed_executor_backend") == backend


@pytest.mark.parametrize(
    ("role", "message"),
    [
        ({"executor": "ray"}, "executor `ray` needs num_gpus = tensor_parallel_size"),
        ({"executor": "ray", "num_gpus": 1, "tensor_parallel_size": 2}, "a GPU for each rank, not 1 for 2"),
        ({"executor": "ray", "num_gpus": 1, "placement": "apart"}, "placement `apart` is not for executor `ray`"),
        ({"executor": "uni"}, "decode.executor"),
    ],
)
def test_what_cannot_be_placed(role: dict[str, Any], message: str) -> None:
    """Refused by name."""
    with pytest.raises(SettingsError, match=message):
        settings("decode", **role)


class Idle:
    """Stands in for an engine's actor: asks for what one asks for, starts nothing."""

    async def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings

    def record_replica_metadata(self) -> dict[str, Any]:
        return {}

    async def node(self) -> str:
        return where()

    async def ranks(self) -> list[str]:
        """Where a rank in each bundle of this replica's group is, placed as vLLM's Ray executor places its workers."""
        group = ray.util.get_current_placement_group()
        assert group is not None
        remote = ray.remote(num_cpus=0, num_gpus=1)(where)
        return list(
            await asyncio.gather(
                *(
                    remote.options(
                        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
                    ).remote()
                    for index in range(len(group.bundle_specs))
                )
            )
        )


def where() -> str:
    """The name of this node: the label that the cluster below gives it."""
    return str(ray.get_runtime_context().get_node_labels()["name"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A head that offers nothing, and the nodes."""
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "labels": {"name": "head"}, **small})
    try:
        for name in NODES:
            cluster.add_node(num_cpus=4, num_gpus=GPUS, labels={"name": name}, object_store_memory=80 * 2**20)
        ray.init(address=cluster.address, namespace="serve", log_to_driver=False)
        serve.start(proxy_location="Disabled")
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def nodes(handle: Any, replicas: int, method: str = "node") -> list[Any]:
    """What each replica says, in no order."""
    answers = handle.options(method_name=method).broadcast(method).results(timeout_s=60)
    assert len(answers) == replicas
    return list(answers)


def run(application: str, role: RoleName, settings: ServiceSettings) -> Any:
    return serve.run(deploy_engine(Idle, role, settings), name=application, route_prefix=None)


@pytest.fixture
def serving(cluster: None) -> Iterator[Any]:
    """Starts applications, and takes them down after the test."""
    names: list[str] = []

    def start(role: RoleName, **role_settings: Any) -> Any:
        names.append(f"application {len(names)}")
        return run(names[-1], role, settings(role, **role_settings))

    yield start
    for name in names:
        serve.delete(name)


TWO = {"tensor_parallel_size": 2, "num_gpus": 2, "replicas": 2}


def test_any_spreads_and_leaves_the_head_alone(serving: Any) -> None:
    """Two replicas that would fit on one node are on two; none is on the head."""
    found = nodes(serving("prefill", **TWO), 2)
    assert len(set(found)) == 2
    assert "head" not in found


def test_packed_shares_nodes_between_roles(serving: Any) -> None:
    """Prefill's two engines fill a node, and decode's two another, though three are there."""
    prefill = nodes(serving("prefill", placement="packed", **TWO), 2)
    decode = nodes(serving("decode", placement="packed", **TWO), 2)
    assert sorted(Counter(prefill + decode).values()) == [2, 2]
    assert "head" not in prefill + decode


def test_packed_puts_decode_beside_prefill(serving: Any) -> None:
    """Half a node each: together on one."""
    one = TWO | {"replicas": 1, "placement": "packed"}
    assert nodes(serving("prefill", **one), 1) == nodes(serving("decode", **one), 1)


def test_apart_is_one_to_a_node(serving: Any) -> None:
    """Three small replicas on three nodes."""
    found = nodes(serving("decode", placement="apart", num_gpus=1, replicas=3), 3)
    assert sorted(found) == list(NODES)


def test_labels_decide(serving: Any) -> None:
    """For an actor and for a group."""
    for placement in ("any", "packed"):
        assert nodes(serving("prefill", placement=placement, label_selector={"name": "b"}, num_gpus=1), 1) == ["b"]


def test_ranks_of_the_ray_executor_share_a_node_where_there_is_room(serving: Any) -> None:
    """Four ranks, four GPUs."""
    (ranks,) = nodes(serving("prefill", executor="ray", tensor_parallel_size=4, num_gpus=4), 1, "ranks")
    assert Counter(ranks).most_common() == [(ranks[0], 4)]


def test_an_engine_larger_than_a_node_takes_two(serving: Any) -> None:
    """Six ranks: a whole node and a half, the actor beside its first rank."""
    handle = serving("decode", executor="ray", tensor_parallel_size=6, num_gpus=6)
    (ranks,) = nodes(handle, 1, "ranks")
    assert sorted(Counter(ranks).values()) == [2, 4]
    assert nodes(handle, 1) == [ranks[0]]
