"""The steps of `make setting-changes`: one or more for each row of the reference, all valid."""

from __future__ import annotations

from pathlib import Path

from ray.serve.schema import ServeDeploySchema

from actors.autoscaling import policy
from actors.engine.arguments import check_arguments
from configs.changes import change_of
from configs.settings.parsing import changed_limits, parse_scaling, parse_settings
from tests.campaigns.service.setting_changes.running import Replica, Replicas, restarted
from tests.campaigns.service.setting_changes.steps import (
    NOT_TRIED,
    POLICY,
    ROLE_POLICY,
    Files,
    Step,
    base_config,
    rows,
    steps,
)

CERTIFICATE = (Path("/tls/chain"), Path("/tls/key"), Path("/tls/authority"))
STEPS = steps(Files(Path("/folder"), (CERTIFICATE, (Path("/b/chain"), Path("/b/key"), Path("/b/ca"))), (1, 2, 3)))


def test_the_policies_are_those_of_the_product() -> None:
    assert (POLICY, ROLE_POLICY) == (policy.POLICY, policy.ROLE_POLICY)


def test_every_row_is_changed_as_its_mark_says() -> None:
    marked = [(one.section, one.key) for one in STEPS if one.change == change_of(one.section, one.key)]
    assert sorted([*marked, *NOT_TRIED]) == sorted(rows())


def test_every_step_changes_one_value_and_is_valid() -> None:
    base = base_config(8000)
    kept, group = base, None
    for step in STEPS:
        if step.group != group:
            kept, group = base, step.group
        start = step.start(kept)
        assert step.before(start) != step.value, step.name
        changed = step.changed(start, {"num_cpus": 0.3})
        assert step.before(changed) != step.before(start) or step.key in ("environment", "placement"), step.name
        _check(changed, step)
        if step.keep:
            kept = changed


def _running(**ids: str) -> Replicas:
    return {name: {one: Replica(one, one) for one in listed.split()} for name, listed in ids.items()}


def test_ended_replicas_are_found() -> None:
    """A replaced replica counts as a restart of its role; an added replica does not."""
    before = _running(Prefill="p", Decode="d e", Router="r")
    assert restarted(before, before) == "none"
    assert restarted(before, _running(Prefill="p q", Decode="d e", Router="r")) == "none"
    assert restarted(before, _running(Prefill="q", Decode="d e", Router="r")) == "Prefill"
    assert restarted(before, _running(Prefill="p", Decode="d f", Router="s")) == "Decode (1 of 2), Router"
    assert restarted(before, _running(Prefill="q", Decode="f g", Router="s")) == "all"
    assert restarted(before, {}) == "all"


def _check(config: dict[str, object], step: Step) -> None:
    schema = ServeDeploySchema.model_validate(config).applications[0]
    settings = parse_settings(schema.args)
    check_arguments(settings)
    parse_scaling((schema.autoscaling_policy or {}).get("policy_kwargs") or {})
    for one in schema.deployments:
        if isinstance(one.user_config, dict):
            changed_limits(settings.router.limits(), one.user_config)
