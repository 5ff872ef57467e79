"""Read the values in effect from replicas and from Serve's controller, by `__ray_call__`.

Ray runs these functions inside the actors. They return plain data.
"""

from __future__ import annotations

import os
from typing import Any

CALL_S = 30.0


def replica_state(actor: Any) -> dict[str, Any]:
    """Return the settings in effect in one replica; `actor` is Serve's `ReplicaActor`."""
    import ray

    replica = actor._replica_impl  # noqa: SLF001 - Serve has no public name for it
    deployed = replica._deployment_config  # noqa: SLF001 - Serve has no public name for it
    inside = replica._user_callable_wrapper._callable  # noqa: SLF001 - Serve has no public name for it
    state = {
        "environment": dict(os.environ),
        "resources": dict(ray.get_runtime_context().get_assigned_resources()),
        "node_id": ray.get_runtime_context().get_node_id(),
        "start_attempts": deployed.max_constructor_retry_count,
    }
    return state | (_router_state(replica, inside) if hasattr(inside, "limits") else _engine_state(inside))


def _router_state(replica: Any, router: Any) -> dict[str, Any]:
    settings, _models = replica._user_callable_wrapper._init_args[:2]  # noqa: SLF001 - see above
    server = getattr(router, "_http_server", None)
    return {
        "settings": {"router": settings.model_dump(mode="json")},
        "limits": router.limits.model_dump(mode="json"),
        "routing": [model.feedback.planner.settings.model_dump(mode="json") for model in router.models],
        "models": [model.names for model in router.models],
        "listens": server._where if server is not None else None,  # noqa: SLF001 - no public name
        "leave_s": server._leave_s if server is not None else None,  # noqa: SLF001 - no public name
    }


def _engine_state(engine: Any) -> dict[str, Any]:
    ranks = engine._rank_metadata  # noqa: SLF001 - the public one contains the producer, too
    return {**engine.engine.given, "ranks": ranks, "describe": engine.engine.describe()}


def scaling_settings(controller: Any, application: str) -> dict[str, Any]:
    """Return the settings of the application's autoscaling policy; runs in Serve's controller."""
    states = controller.autoscaling_state_manager._app_autoscaling_states  # noqa: SLF001 - no public name
    policy = states[application]._policy.__wrapped__  # noqa: SLF001 - no public name
    found: dict[str, Any] = policy._settings.model_dump(mode="json")  # noqa: SLF001 - no public name
    return found


def drains(controller: Any, application: str, deployment: str) -> dict[str, Any]:
    """Return the seconds after which Serve's controller ends each stopping replica, by its id.

    The controller, not the replica, ends a replica that still drains (`graceful_stop` in
    ray/serve/_private/deployment_state.py).
    """
    from ray.serve._private.common import DeploymentID

    states = controller.deployment_state_manager._deployment_states  # noqa: SLF001 - no public name
    replicas = states[DeploymentID(name=deployment, app_name=application)]._replicas.get()  # noqa: SLF001 - as above
    return {
        one.replica_id.unique_id: one._actor.graceful_shutdown_timeout_s  # noqa: SLF001 - no public name
        for one in replicas
    }


def ask(name: str, function: Any, *arguments: object) -> dict[str, Any]:
    """Run `function` in the actor `name` of Serve. Raises RayError or ValueError if it fails."""
    import ray

    actor = ray.get_actor(name, namespace="serve")
    found: dict[str, Any] = ray.get(actor.__ray_call__.remote(function, *arguments), timeout=CALL_S)
    return found
