"""Serve's deployment options for an engine replica: its resources and placement. Pure.

    executor  a replica is
    mp        an actor with all GPUs of its engine: the ranks are processes of the actor, on its node
    ray       a placement group with a GPU per rank, on as few nodes as possible; the actor is beside the first rank

Serve chooses the nodes of `mp` replicas: spread, or packed onto nodes in use.
"""

from typing import Any

from configs.settings import RoleSettings


def deployment_options(role: RoleSettings, runtime_env: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `role`'s deployment for resources and placement."""
    actor = {"num_cpus": role.num_cpus, "resources": role.resources, "runtime_env": runtime_env}
    if role.executor == "mp":
        return {
            "ray_actor_options": actor | {"num_gpus": role.num_gpus, "label_selector": role.label_selector},
            **role.spreading_options(),
        }
    return {
        # The ranks own the GPUs and the bundles have the labels: the actor follows its placement
        # group.
        "ray_actor_options": actor | {"num_gpus": 0.0},
        "placement_group_bundles": bundles(role),
        "placement_group_strategy": "PACK",
        **({"placement_group_bundle_label_selector": [role.label_selector]} if role.label_selector else {}),
    }


def bundles(role: RoleSettings) -> list[dict[str, float]]:
    """Return one bundle per rank; the first includes the actor's resources."""
    return [
        {"CPU": role.num_cpus, **role.resources, "GPU": 1.0},
        *({"GPU": 1.0} for _ in range(role.tensor_parallel_size - 1)),
    ]
