"""What an engine's replica asks Ray for, in the words of Serve's deployment options: pure.

executor  a replica is
mp        an actor with all GPUs of its engine: the ranks are processes of the actor, hence on its node
ray       a placement group with a GPU for each rank, on as few nodes as have room; the actor is beside the first rank

Where a replica of the first kind goes is Serve's to say: spread, or packed onto nodes that are in use.
"""

from typing import Any

from configs.settings import RoleSettings


def placed(role: RoleSettings, runtime_env: dict[str, Any]) -> dict[str, Any]:
    """The options of `role`'s deployment that say what a replica asks for and where it may go."""
    actor = {"num_cpus": role.num_cpus, "resources": role.resources, "runtime_env": runtime_env}
    if role.executor == "mp":
        return {
            "ray_actor_options": actor | {"num_gpus": role.num_gpus, "label_selector": role.label_selector},
            "max_replicas_per_node": role.max_replicas_per_node,
        }
    return {
        # The GPUs are the ranks', and labels the bundles': an actor goes where its group is.
        "ray_actor_options": actor | {"num_gpus": 0.0},
        "placement_group_bundles": bundles(role),
        "placement_group_strategy": "PACK",
        **({"placement_group_bundle_label_selector": [role.label_selector]} if role.label_selector else {}),
    }


def bundles(role: RoleSettings) -> list[dict[str, float]]:
    """A bundle for each rank, the first with what the actor asks for."""
    return [
        {"CPU": role.num_cpus, **role.resources, "GPU": 1.0},
        *({"GPU": 1.0} for _ in range(role.tensor_parallel_size - 1)),
    ]
