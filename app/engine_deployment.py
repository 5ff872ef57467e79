"""Deploy the engines of a model: Serve's options for their replicas, and their shared secret.

    executor  resources of a replica
    mp        an actor with all GPUs of its engine; the ranks are processes of the actor
    ray       a placement group with one GPU per rank, on as few nodes as possible; the actor is on
              the node of the first rank

Serve spreads `mp` replicas over nodes. With RAY_SERVE_USE_PACK_SCHEDULING_STRATEGY=1 in the
environment of its controller, Serve packs them onto nodes in use, unless a role on the cluster has
executor `ray` (`_use_pack_strategy` in ray/serve/_private/deployment_scheduler.py).
"""

import secrets
from typing import Any

from pydantic import SecretStr
from ray import serve
from ray.serve.config import RequestRouterConfig

from actors.autoscaling.policy import ROLE_POLICY
from actors.engine.arguments import engine_environment
from actors.engine_pool.serve_discovery import DiscoveryRouter
from actors.upstream import ray_private
from configs.settings.base import RoleName
from configs.settings.deployment import RoleSettings
from configs.settings.service import ServiceSettings

SERVE_CALLS = 65536
"""Serve's limit on a replica's calls, so high that Tandem's limits apply first."""

HEALTH_CHECK_PERIOD_S = 2.0
"""Serve replaces a replica after three failed checks, so a dead engine after about 6 s."""

ANNOUNCE_S = 5.0
"""Interval in seconds at which Serve reads `EngineActor.record_routing_stats`, for all routers."""

DRAIN_POLL_S = 0.2
"""Interval in seconds at which Serve checks whether a stopping replica has ongoing Serve calls.

Serve also waits for one interval before the first check. The replicas drain requests that do not
pass through Serve (docs/decisions/0036), so Serve's default of 2 s would only delay each stop.
"""

SECRET_KEY = b"peer-secret"


def fallback_secret(settings: ServiceSettings) -> SecretStr:
    """Return the operator's secret, else the Ray cluster's; engines prefer their own environment's.

    Raises SettingsError if the secret in the environment is too short.
    """
    return settings.transfer.operators_secret() or SecretStr(cluster_secret())


def cluster_secret() -> str:
    """Return the secret in the Ray cluster's control store; generate and store it if necessary.

    Serve builds the application again after a change of `args`. Old and new replicas run at the
    same time and could not authenticate each other with a new secret per build. In a process
    without a Ray cluster, return a new secret.
    """
    fresh = secrets.token_hex(32)
    if not ray_private.store_connected():
        return fresh  # `serve build` starts no engines, which would need the same secret
    # Of two concurrent builds, both use the secret that is stored first.
    ray_private.store_put(SECRET_KEY, fresh, overwrite=False)
    kept = ray_private.store_get(SECRET_KEY)
    assert kept is not None, f"Ray's control store has no key {SECRET_KEY!r}, although it was just stored"
    return kept.decode()


def deploy_engine(
    actor: type, role: RoleName, settings: ServiceSettings, secret: SecretStr, suffix: str = ""
) -> serve.Application:
    own = settings.role(role)
    scaling: dict[str, Any] = (
        {"num_replicas": own.replicas}
        if isinstance(own.replicas, int)
        else {"autoscaling_config": {"policy": {"policy_function": ROLE_POLICY}, **own.replicas}}
    )
    deployment = serve.deployment(
        actor,
        name=role.capitalize() + suffix,
        max_ongoing_requests=SERVE_CALLS,
        request_router_config=RequestRouterConfig(
            request_router_class=DiscoveryRouter, request_routing_stats_period_s=ANNOUNCE_S
        ),
        graceful_shutdown_timeout_s=own.drain_s,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        max_constructor_retry_count=own.start_attempts,
        **deployment_options(own, {"env_vars": engine_environment(settings, role)}),
        **scaling,
    )
    return deployment.bind(settings, secret)


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
