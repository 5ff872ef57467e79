"""Map each setting of a running service to the restarts that its change causes. Pure functions.

Ray Serve computes one code version from `args`, all autoscaling policies and a few other keys, and
restarts every replica of the application when the version changes (`get_app_code_version` in
`ray/serve/_private/deploy_utils.py`). Most options under `deployments` are not part of that
version; those named here override `args` for one deployment.
"""

from dataclasses import dataclass
from typing import Literal

from configs.settings.router import RouterLimits

Cost = Literal["live", "role", "all"]
"""Replicas that restart: none (`live`), one deployment's (`role`), or the application's (`all`)."""


@dataclass(frozen=True)
class Change:
    """The way to change a setting that causes the fewest restarts."""

    cost: Cost
    option: str | None = None
    """Dotted key of the deployment's entry under `deployments` in the Serve config file.

    None: the only way is to change the setting itself, in `args` or `autoscaling_policy`.
    """


ALL = Change("all")
USER_CONFIG = Change("live", "user_config")

DEPLOYMENTS = {"prefill": "Prefill", "decode": "Decode", "router": "Router"}
"""Deployment by the section of `args` that configures it, in a service without `models`."""

OPTIONS = {
    "replicas": Change("live", "num_replicas"),
    "drain_s": Change("live", "graceful_shutdown_timeout_s"),
    "label_selector": Change("role", "ray_actor_options.label_selector"),
    "num_cpus": Change("role", "ray_actor_options.num_cpus"),
    "num_gpus": Change("role", "ray_actor_options.num_gpus"),
    "resources": Change("role", "ray_actor_options.resources"),
    "environment": Change("role", "ray_actor_options.runtime_env.env_vars"),
    "placement": Change("role", "max_replicas_per_node"),
}
"""Changes of a deployment's settings for which Serve has an option, by setting.

With `executor: ray`, other options replace some of these (docs/configuration.md).
"""


def change_of(section: str, key: str) -> Change:
    """Return the way to change `key` that causes the fewest restarts.

    ``section``  path of the key's section in `args`, such as `router.routing`; empty for a key of
                 `args` itself; `autoscaling_policy` for a key of its `policy_kwargs`
    """
    if section == "router.routing" or (section == "router" and key in RouterLimits.model_fields):
        return USER_CONFIG
    return OPTIONS.get(key, ALL) if section in DEPLOYMENTS else ALL
