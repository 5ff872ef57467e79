"""Change settings of a running service: the replicas restart that `configs/changes.py` promises.

`tests/configs/test_changes.py` compares all settings with Serve's rules; here Serve applies one
change of each kind, with real engines, and the change is seen from outside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from configs.changes import DEPLOYMENTS, Change, change_of
from tests.campaigns.runner import Report
from tests.campaigns.service.cluster import Cluster, restarted
from tests.campaigns.service.world import BODY, status, until

BIG = BODY | {"prompt": "x" * 60_000}


def _status_of(url: str, body: dict[str, Any]) -> int:
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code


def _role(url: str, role: str) -> list[dict[str, Any]]:
    return [one for one in status(url)["engines"] if one["role"] == role]


@dataclass(frozen=True)
class Step:
    """A change of one setting, and what shows that it is in effect."""

    section: str
    key: str
    value: Any
    in_effect: Callable[[str], bool] = field(default=lambda _: True)


STEPS = (
    Step("router", "max_body_bytes", 50_000, lambda url: _status_of(url, BIG) == 413),
    Step(
        "router", "max_body_byte", 10, lambda url: "max_body_bytes" in str(status(url)["routers"][0]["rejected_config"])
    ),
    Step("router.routing", "policy", "always_remote", lambda url: _status_of(url, BODY) == 200),
    Step("decode", "replicas", 2, lambda url: len(_role(url, "decode")) == 2),
    Step("decode", "drain_s", 7.0),
    Step("decode", "num_cpus", 0.2),
    Step("prefill", "environment", {"SETTING_CHANGES": "1"}),
    Step("transfer", "lease_s", 31.0),
    Step("", "served_model_name", "renamed", lambda url: _status_of(url, BODY | {"model": "renamed"}) == 200),
)


def setting_changes(report: Report, *, only: str = "", damage: float = 0.0) -> None:
    """With ``damage``, every change is expected to restart all replicas."""
    role = {"num_cpus": 0.3, "start_attempts": 1}
    router = {"num_cpus": 0.1, "leave_s": 0.1}
    cluster = Cluster(report.folder, prefill=role, decode=role, router=router)
    try:
        cluster.nodes.start_head()
        cluster.nodes.start_worker(4)
        cluster.deploy()
        for step in STEPS:
            if only in f"{step.section}.{step.key}":
                with report.case(f"{step.section}.{step.key}"):
                    _change(report, cluster, step, damage)
    finally:
        cluster.close()


def _change(report: Report, cluster: Cluster, step: Step, damage: float) -> None:
    name = f"{step.section}.{step.key}".lstrip(".")
    change = Change("live", "user_config") if step.key == "max_body_byte" else change_of(step.section, step.key)
    deployment = DEPLOYMENTS.get(step.section.partition(".")[0], "")
    before, began = cluster.replicas(), time.monotonic()
    _apply(cluster, step, change, deployment)
    cluster.deploy()
    with report.case(name):
        until(lambda: step.in_effect(cluster.url), f"{name} is in effect", 60)
    promised = {"live": "none", "all": "all"}.get(change.cost) or deployment
    found = restarted(before, cluster.replicas())
    served = cluster.application["args"].get("served_model_name", BODY["model"])
    answered = _status_of(cluster.url, BODY | {"model": served})
    report.row(
        setting=name, cost=change.cost, restarted=found, request=answered, seconds=round(time.monotonic() - began)
    )
    report.equal(f"{name}: restarted", found, "all" if damage else promised)
    report.equal(f"{name}: a request", answered, 200)


def _apply(cluster: Cluster, step: Step, change: Change, deployment: str) -> None:
    """Change the setting as docs/configuration.md says."""
    if change.option is None:
        outer = cluster.application["args"]
        for key in step.section.split(".") if step.section else ():
            outer = outer.setdefault(key, {})
        outer[step.key] = step.value
        return
    inner = cluster.entry(deployment)
    if change.option == "user_config":
        inner = inner.setdefault("user_config", {})
        if step.section == "router.routing":
            inner = inner.setdefault("routing", {})
        inner.pop("max_body_byte", None)  # the unknown key of the step before
        inner[step.key] = step.value
        return
    *path, last = change.option.split(".")
    if path[:1] == ["ray_actor_options"]:  # an override replaces all of them
        options = cluster.details()["deployments"][deployment]["deployment_config"]["ray_actor_options"]
        inner.setdefault("ray_actor_options", options)
    for key in path:
        inner = inner.setdefault(key, {})
    inner[last] = {**(inner.get(last) or {}), **step.value} if isinstance(step.value, dict) else step.value
