"""Where an engine's replicas may go, in the words of Serve's deployment options: pure.

placement  executor  what a replica asks Ray for
any        mp        an actor with the engine's GPUs; Serve spreads actors over the nodes with room
apart      mp        the same, and at most one of its deployment on a node
packed     mp        a placement group of one bundle: Ray puts groups on the fullest node that has room for them
any        ray       a bundle for each rank, packed on as few nodes as have room; the actor shares the first rank's
packed     ray       the same

With `mp` an engine's ranks are on one node because they are processes of one actor.
"""

from typing import Any

from configs.settings import RoleSettings


def placed(role: RoleSettings, runtime_env: dict[str, Any]) -> dict[str, Any]:
    """The options of `role`'s deployment that say what a replica asks for and where it may go."""
    actor = {
        "num_cpus": role.num_cpus,
        "num_gpus": 0.0 if role.executor == "ray" else role.num_gpus,
        "resources": role.resources,
        "label_selector": role.label_selector,
        "runtime_env": runtime_env,
    }
    group = bundles(role)
    if not group:
        return {"ray_actor_options": actor, "max_replicas_per_node": role.max_replicas_per_node}
    return {
        # An actor in a placement group goes where the group is, which the bundles' selector decides.
        "ray_actor_options": {key: value for key, value in actor.items() if key != "label_selector"},
        "placement_group_bundles": group,
        "placement_group_strategy": "PACK" if role.executor == "ray" else "STRICT_PACK",
        **({"placement_group_bundle_label_selector": [role.label_selector]} if role.label_selector else {}),
    }


def bundles(role: RoleSettings) -> list[dict[str, float]]:
    """The bundles of one replica's placement group, the actor's first; none where it needs no group."""
    if role.executor == "mp" and role.placement != "packed":
        return []
    actor = {"CPU": role.num_cpus, **role.resources}
    if role.executor == "mp":
        return [actor | ({"GPU": role.num_gpus} if role.num_gpus else {})]
    return [actor | {"GPU": 1.0}, *({"GPU": 1.0} for _ in range(role.tensor_parallel_size - 1))]
