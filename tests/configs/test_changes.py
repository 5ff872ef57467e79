"""The changes in the configuration reference, against Serve's own rules for restarts."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve._private.version import DeploymentVersion
from ray.serve.schema import ServeApplicationSchema

from actors.autoscaling.policy import ROLE_POLICY
from actors.engine.arguments import engine_arguments
from app.main import ROUTER_ENVIRONMENT, build
from configs.changes import DEPLOYMENTS, Change, change_of
from configs.reference import SECTIONS, reference
from configs.settings.base import SettingsError
from configs.settings.parsing import changed_limits, parse_settings
from configs.settings.router import RouterLimits
from testing.serve_objects import deployment_config_of, deployment_of, replica_config_of

EVERYTHING = {"Prefill", "Decode", "Router"}
AUTOSCALING = {"min_replicas": 1, "max_replicas": 2, "policy": {"policy_function": ROLE_POLICY}}

SETTINGS = [
    (section, name)
    for title, model, sections in SECTIONS
    for section in sections
    for name in sorted(model.model_fields)
]
"""Every row of the reference, as a section of `args` and a key."""


def application(deployments: list[dict[str, Any]] | None = None, **keys: Any) -> dict[str, Any]:
    return {"name": "tandem", "import_path": "app.main:build", "args": {}, "deployments": deployments or []} | keys


@cache
def built() -> dict[str, DeploymentInfo]:
    """Return the deployments of a service with default settings, as Serve's controller has them."""
    router = deployment_of(build(parse_settings({})))
    bound = [router, *(deployment_of(one) for one in router.init_args[1][0][:2])]
    return {
        one.name: DeploymentInfo(deployment_config_of(one), replica_config_of(one), start_time_ms=0, deployer_job_id="")
        for one in bound
    }


def versions(config: dict[str, Any]) -> dict[str, DeploymentVersion]:
    """Return the values that Serve compares when a configuration replaces another."""
    schema = ServeApplicationSchema.model_validate(config)
    code = get_app_code_version(schema)
    return {
        name: DeploymentVersion(
            code,
            info.deployment_config,
            info.replica_config.ray_actor_options,
            info.replica_config.placement_group_bundles,
            max_replicas_per_node=info.replica_config.max_replicas_per_node,
        )
        for name, info in override_deployment_info(deepcopy(built()), schema).items()
    }


def restarted(old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    before, after = versions(old), versions(new)
    return {name for name in before if before[name].requires_actor_restart(after[name])}


def another(field: Any) -> Any:
    """Return a value of this setting other than its default."""
    if get_origin(field.annotation) is Literal:
        return next(one for one in get_args(field.annotation) if one != field.default)
    match field.default:
        case bool():
            return not field.default
        case int() | float():
            return field.default + 1
        case None:
            return 7
        case _:
            return f"{field.default}-x"


def override(change: Change, section: str, value: Any) -> dict[str, Any]:
    """Return an application with this option of one deployment."""
    assert change.option is not None
    *outer, last = change.option.split(".")
    options: dict[str, Any] = {"name": DEPLOYMENTS[section.partition(".")[0]]}
    inner = options
    for key in outer:
        inner = inner.setdefault(key, {})
    inner[last] = value
    return application([options])


@pytest.mark.parametrize(("section", "key"), SETTINGS)
def test_the_cheapest_way_restarts_no_more_than_it_says(section: str, key: str) -> None:
    """A change restarts nothing, the replicas of one deployment, or all. In `args`, every change
    restarts all.
    """
    inner: dict[str, Any] = {key: "changed"}
    for outer in reversed(section.split(".") if section else []):
        inner = {outer: inner}
    whole = application(**(inner if section == "autoscaling_policy" else {"args": inner}))
    assert restarted(application(), whole) == EVERYTHING
    change = change_of(section, key)
    if change.option is None:
        assert change.cost == "all"
        return
    values: dict[str, Any] = {
        "num_replicas": 3,
        "graceful_shutdown_timeout_s": 77.0,
        "max_replicas_per_node": 1,
        "user_config": {key: 1},
        "ray_actor_options.num_cpus": 0.7,
        "ray_actor_options.num_gpus": 0.5,
        "ray_actor_options.resources": {"x": 1.0},
    }
    changed = override(change, section, values.get(change.option, {"x": "y"}))
    only = {DEPLOYMENTS[section.partition(".")[0]]}
    assert restarted(application(), changed) == (only if change.cost == "role" else set())
    assert [name for name, one in versions(changed).items() if one != versions(application())[name]] in (
        [],  # num_replicas is no part of a version
        list(only),
    )


@pytest.mark.parametrize(("section", "key"), SETTINGS)
def test_user_config_takes_what_is_said_to_change_with_it_and_nothing_else(section: str, key: str) -> None:
    """`user_config` refuses the other keys of the router by name."""
    if not section.startswith("router"):
        return
    model: type[BaseModel] = next(model for _, model, sections in SECTIONS if section in sections)
    value = another(model.model_fields[key])
    user_config = {key: value} if section == "router" else {"routing": {key: value}}
    if key == "routing":
        return
    if change_of(section, key).option != "user_config":
        with pytest.raises(SettingsError, match=f"^{key}: not a key of user_config"):
            changed_limits(RouterLimits(), user_config)
        return
    changed = changed_limits(RouterLimits(), user_config)
    assert getattr(changed if section == "router" else changed.routing, key) == value


def test_a_user_config_that_is_taken_away_reaches_the_router() -> None:
    """Serve calls `reconfigure` with the value that `build` set; for None it would not call it."""
    changed = override(change_of("router", "attempts"), "router", {"attempts": 2})
    found = [versions(one)["Router"].deployment_config.user_config for one in (changed, application())]
    assert found == [{"attempts": 2}, {}]


def test_autoscaling_bounds_change_live_if_they_stood_under_deployments_before() -> None:
    """Serve's version counts the policies listed there; adding the first one is a change."""

    def bounded(most: int) -> dict[str, Any]:
        return application([{"name": "Prefill", "autoscaling_config": AUTOSCALING | {"max_replicas": most}}])

    assert restarted(application(), bounded(2)) == EVERYTHING
    assert restarted(bounded(2), bounded(5)) == set()


def test_actor_options_replace_those_of_the_service() -> None:
    """An override must repeat the other options, as docs/configuration.md states."""
    before = versions(application())["Prefill"].ray_actor_options
    changed = override(change_of("prefill", "num_cpus"), "prefill", 2)
    after = versions(changed)["Prefill"].ray_actor_options
    assert before is not None
    assert after is not None
    page = reference()
    for name in (*before["runtime_env"]["env_vars"], *ROUTER_ENVIRONMENT):
        assert f"`{name}" in page
    assert "env_vars" not in after.get("runtime_env", {})


def test_the_option_num_gpus_moves_no_engine_to_another_device() -> None:
    """The engine's arguments follow `args`, as docs/configuration.md says."""
    gpus = override(change_of("decode", "num_gpus"), "decode", 1)
    assert restarted(application(), gpus) == {"Decode"}
    without, with_gpu = parse_settings({}), parse_settings({"decode": {"num_gpus": 1}})
    assert "worker_cls" in engine_arguments(without, "decode")
    assert "worker_cls" not in engine_arguments(with_gpu, "decode")
    assert "a change from or to 0 must be in `args`" in reference()
