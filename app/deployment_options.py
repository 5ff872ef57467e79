"""Serve's deployment options for an engine replica: its resources and placement. Pure functions.

    executor  resources of a replica
    mp        an actor with all GPUs of its engine; the ranks are processes of the actor
    ray       a placement group with one GPU per rank, on as few nodes as possible; the actor is on
              the node of the first rank

Serve spreads `mp` replicas over nodes. With RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1 in the
environment of its controller, Serve packs them onto nodes in use, unless a role on the cluster has
executor `ray` (`_use_pack_strategy` in ray/serve/_private/deployment_scheduler.py).
"""

from typing import Any

from configs.settings.deployment import RoleSettings


def deployment_options(role: RoleSettings, runtime_env: dict[str, Any]) -> dict[str, Any]:
    actor = {"num_cpus": role.num_cpus, "resources": role.resources, "runtime_env": runtime_env}
    if role.executor == "mp":
        return {
            "ray_actor_options": actor | {"num_gpus": role.num_gpus, "label_selector": role.label_selector},
            **role.spreading_options(),
        }
    return {
        # The actor has no GPUs or labels of its own: the ranks own the GPUs, and the labels apply
        # to the bundles of the placement group.
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
