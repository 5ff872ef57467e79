"""Mistakes of a kustomization; `make campaign NAME=manifests OVERLAYS=…` reports them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.k8s import schemas, service
from tests.k8s.kustomize import Manifest
from tests.k8s.network import selects

ROOT = Path(__file__).resolve().parents[2] / "k8s"
DIRECTORIES = (ROOT / "base", *sorted(path.parent for path in ROOT.glob("overlays/*/kustomization.yaml")))


def problems(manifests: list[Manifest]) -> list[str]:
    """Return one line per mistake; schemas first, because the other rules rely on valid shapes."""
    found = [f"{_called(one)}: {line}" for one in manifests for line in schemas.problems(one)]
    if found:
        return found
    services = [one for one in manifests if one["kind"] == "RayService"]
    for one in services:
        found += [f"{_called(one)}: {line}" for line in service.problems(one)]
    if len(services) != 1:
        return [*found, f"{len(services)} RayServices, not one"]
    return [*found, *_selectors(manifests), *_budgets(manifests, services[0])]


def only(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def pods(manifests: list[Manifest]) -> dict[str, dict[str, Any]]:
    """Return labels and (fewest, most) pods of each kind: `head`, the worker groups, `redis`."""
    (ray_service,) = only(manifests, "RayService")
    cluster = ray_service["spec"]["rayClusterConfig"]
    found = {"head": _pod(cluster["headGroupSpec"], 1)}
    for group in cluster.get("workerGroupSpecs", []):
        found[group["groupName"]] = _pod(group, group["minReplicas"])
    for one in only(manifests, "StatefulSet"):
        found[one["metadata"]["name"]] = _pod(one["spec"], one["spec"]["replicas"])
    return found


def _pod(group: dict[str, Any], fewest: int) -> dict[str, Any]:
    # KubeRay adds a group's Ray labels to its pods (recorded.py).
    labels = {**group["template"]["metadata"].get("labels", {}), **group.get("labels", {})}
    ports = {one.get("name") for one in group["template"]["spec"]["containers"][0].get("ports", [])}
    return {"labels": labels, "fewest": fewest, "ports": ports}


def _selectors(manifests: list[Manifest]) -> Iterator[str]:
    """Each selector must select a pod, and a monitor's pods must have its port."""
    known = pods(manifests)
    for one in manifests:
        spec = one.get("spec", {})
        selector = spec.get("podSelector") if one["kind"] == "NetworkPolicy" else None
        if one["kind"] in ("PodDisruptionBudget", "PodMonitor"):
            selector = spec["selector"]
        if one["kind"] == "Service":
            selector = {"matchLabels": spec["selector"]}
        if selector is None:
            continue
        chosen = {name: pod for name, pod in known.items() if selects(selector, pod["labels"])}
        if not chosen:
            yield f"{_called(one)}: selects no pod"
        for endpoint in spec.get("podMetricsEndpoints", []):
            for name, pod in chosen.items():
                if endpoint["port"] not in pod["ports"]:
                    yield f"{_called(one)}: pods of {name} have no port {endpoint['port']!r}"


def _budgets(manifests: list[Manifest], ray_service: Manifest) -> Iterator[str]:
    """Kubernetes counts the pods of a controller by its scale; KubeRay's resources have none."""
    scaled = "scale" in schemas.subresources(ray_service["apiVersion"], "RayService")
    for one in only(manifests, "PodDisruptionBudget"):
        wanted = one["spec"].get("minAvailable")
        if not scaled and not isinstance(wanted, int):
            yield f"{_called(one)}: must have a whole number of minAvailable, as RayCluster has no scale"
            continue
        fewest = sum(
            pod["fewest"] for pod in pods(manifests).values() if selects(one["spec"]["selector"], pod["labels"])
        )
        if wanted >= fewest:
            yield f"{_called(one)}: minAvailable {wanted} of {fewest} pods: no node with one could be drained"


def _called(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"
