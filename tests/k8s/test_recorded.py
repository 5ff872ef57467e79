"""What the checks assume of KubeRay, against the objects that it made (tests/k8s/recorded)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.k8s import recorded
from tests.k8s.check import ROOT, only, pods
from tests.k8s.kustomize import Manifest, render
from tests.k8s.network import selects
from tests.k8s.service import CUT_OFF_NODE_S, KEEPALIVE_S

ROLES = ("head", "router", "prefill", "decode")
RECORDED = ("head", "router", "decode")


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(ROOT / "overlays" / "cpu")


@pytest.fixture(scope="module")
def groups(manifests: list[Manifest]) -> dict[str, dict[str, Any]]:
    (service,) = only(manifests, "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    return {"head": cluster["headGroupSpec"]} | {one["groupName"]: one for one in cluster["workerGroupSpecs"]}


def environment(role: str) -> dict[str, Any]:
    container = recorded.load(f"{role}-pod")["spec"]["containers"][0]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@pytest.mark.parametrize("role", ROLES)
def test_pods_have_the_labels_that_selectors_are_checked_with(manifests: list[Manifest], role: str) -> None:
    assert pods(manifests)[role]["labels"].items() <= recorded.labels(role).items()


@pytest.mark.parametrize("role", RECORDED)
def test_the_ray_container_is_the_first_and_keeps_its_ports_and_probes(
    groups: dict[str, dict[str, Any]], role: str
) -> None:
    """KubeRay adds no port and no probe where the template has them."""
    made, template = (one["spec"]["containers"][0] for one in (recorded.load(f"{role}-pod"), groups[role]["template"]))
    assert made["name"] == template["name"]
    ports = ({(one["name"], one["containerPort"]) for one in container["ports"]} for container in (made, template))
    assert next(ports) == next(ports)
    asked, wanted = made["livenessProbe"], template["livenessProbe"]
    assert wanted["httpGet"].items() <= asked["httpGet"].items()
    assert wanted | {"httpGet": None} == {key: asked[key] for key in wanted} | {"httpGet": None}


@pytest.mark.parametrize("role", RECORDED)
def test_the_node_has_fixed_ports_and_its_roles_label(groups: dict[str, dict[str, Any]], role: str) -> None:
    """The policies name these ports; `label_selector` finds the label."""
    (command,) = recorded.load(f"{role}-pod")["spec"]["containers"][0]["args"]
    options = dict(re.findall(r"--([a-z-]+)=(\S+)", command))
    params = dict(groups[role]["rayStartParams"])
    del params["object-store-memory"]  # set after the recording
    assert params.items() <= options.items()
    assert options["labels"] == f"tandem/role={role}"


@pytest.mark.parametrize("role", RECORDED)
def test_added_containers_fit_the_restricted_profile(role: str) -> None:
    """KubeRay's init container and autoscaler have the security context of their templates."""
    spec = recorded.load(f"{role}-pod")["spec"]
    contexts = [one["securityContext"] for one in (*spec["containers"], *spec.get("initContainers", []))]
    assert len(contexts) == 2
    assert all(one == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}} for one in contexts)
    assert spec["securityContext"]["runAsNonRoot"]


def test_a_cut_off_worker_ends_when_the_checks_say() -> None:
    assert int(environment("decode")["RAY_gcs_rpc_server_reconnect_timeout_s"]) == CUT_OFF_NODE_S - KEEPALIVE_S


def test_the_heads_service_selects_the_head_alone() -> None:
    """Through its name the operator and the workers reach the head."""
    spec = recorded.load("head-service")["spec"]
    assert [role for role in ROLES if selects({"matchLabels": spec["selector"]}, recorded.labels(role))] == ["head"]
    assert {one["targetPort"] for one in spec["ports"]} == {6379, 8000, 8080, 8265}


def test_the_heads_container_has_the_token() -> None:
    """`tandem upgrade` asks Serve from within it."""
    assert environment("head")["RAY_AUTH_TOKEN"]["secretKeyRef"]["key"] == "auth_token"
