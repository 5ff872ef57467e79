"""Validation of KubeRay's operator beyond its schema, which would only write a Warning event.

After `ray-operator/controllers/ray/utils/validation.go` of KubeRay 1.7.0, for the fields of a
RayService.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_LABEL_PREFIX = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_MAX_NAME = 47
_RESOURCES_IN_PARAMETERS = ("num-cpus", "num-gpus", "memory", "resources")
_UPGRADES = ("NewClusterWithIncrementalUpgrade", "NewCluster", "None")
_OF_FAULT_TOLERANCE = ("REDIS_PASSWORD", "RAY_REDIS_ADDRESS", "REDIS_USERNAME")
_AUTOSCALER_V2_VARIABLE = "RAY_enable_autoscaler_v2"


def problems(service: dict[str, Any]) -> list[str]:
    """Return one line for each rule that the RayService breaks."""
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]} | {
        f"worker group {one['groupName']}": one for one in cluster.get("workerGroupSpecs", [])
    }
    return [
        *_name(service["metadata"]["name"]),
        *_authentication(cluster),
        *(line for name, group in groups.items() for line in _group(name, group)),
        *(line for group in cluster.get("workerGroupSpecs", []) for line in _workers(group, cluster)),
        *_fault_tolerance(service),
        *_autoscaler(cluster, groups),
        *_head(cluster["headGroupSpec"], service["spec"]),
        *_upgrade(service["spec"]),
    ]


def autoscaler_v2(cluster: dict[str, Any]) -> bool:
    return autoscaled(cluster) and cluster.get("autoscalerOptions", {}).get("version") == "v2"


def autoscaled(cluster: dict[str, Any]) -> bool:
    return bool(cluster.get("enableInTreeAutoscaling"))


def environment(group: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the Ray container, which is the first container."""
    return {one["name"]: one for one in group["template"]["spec"]["containers"][0].get("env", [])}


def _name(name: str) -> Iterator[str]:
    if len(name) > _MAX_NAME or not _DNS_1035.fullmatch(name):
        yield f"metadata.name {name!r}: must be a DNS label of at most {_MAX_NAME} characters"


def _authentication(cluster: dict[str, Any]) -> Iterator[str]:
    options = cluster.get("authOptions")
    if options is None:
        return
    if options.get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth: not for a RayService"
    version = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", cluster.get("rayVersion", ""))
    if options.get("mode", "token") == "token" and (not version or tuple(map(int, version.groups())) < (2, 52, 0)):
        yield f"authOptions.mode token needs a rayVersion from 2.52.0 on, not {cluster.get('rayVersion')!r}"


def _group(name: str, group: dict[str, Any]) -> Iterator[str]:
    parameters = group.get("rayStartParams") or {}
    if group.get("resources") and any(parameters.get(key) for key in _RESOURCES_IN_PARAMETERS):
        yield f"{name}: resources are in rayStartParams and in resources; one of them"
    if "labels" in parameters:
        yield f"{name}: labels belong in the group, not in rayStartParams"
    for key, value in group.get("labels", {}).items():
        prefix, _, bare = key.rpartition("/")
        if not _LABEL_NAME.fullmatch(bare) or ("/" in key and not _LABEL_PREFIX.fullmatch(prefix)):
            yield f"{name}: label {key!r} is no Kubernetes label"
        if value and not _LABEL_NAME.fullmatch(value):
            yield f"{name}: value {value!r} of label {key!r} is no Kubernetes label's"
    if not group["template"]["spec"].get("containers"):
        yield f"{name}: needs a container"


def _workers(group: dict[str, Any], cluster: dict[str, Any]) -> Iterator[str]:
    name, low, high = f"worker group {group['groupName']}", group.get("minReplicas"), group.get("maxReplicas")
    if not autoscaled(cluster) and (low is None or high is None):
        yield f"{name}: without autoscaling, minReplicas and maxReplicas must be set"
    if low is not None and high is not None and low > high:
        yield f"{name}: minReplicas {low} is greater than maxReplicas {high}"
    if group.get("suspend") and autoscaled(cluster):
        yield f"{name}: cannot be suspended while the autoscaler is enabled"
    for key in ("idleTimeoutSeconds", "priority"):
        if group.get(key) and not autoscaler_v2(cluster):
            yield f"{name}: {key} needs autoscaler v2"


def _fault_tolerance(service: dict[str, Any]) -> Iterator[str]:
    cluster = service["spec"]["rayClusterConfig"]
    options = cluster.get("gcsFaultToleranceOptions")
    annotations = service["metadata"].get("annotations", {})
    head = cluster["headGroupSpec"]
    variables, parameters = environment(head), head.get("rayStartParams") or {}
    if options is None:
        if "RAY_REDIS_ADDRESS" in variables and annotations.get("ray.io/ft-enabled") != "true":
            yield "head: RAY_REDIS_ADDRESS is set without gcsFaultToleranceOptions"
        return
    for annotation in ("ray.io/ft-enabled", "ray.io/external-storage-namespace"):
        if annotations.get(annotation):
            yield f"annotation {annotation} beside gcsFaultToleranceOptions: only the latter"
    yield from (f"head: {name} beside gcsFaultToleranceOptions" for name in _OF_FAULT_TOLERANCE if name in variables)
    for key in ("redis-password", "redis-username"):
        if parameters.get(key):
            yield f"head: rayStartParams {key} beside gcsFaultToleranceOptions"
    if options.get("backend", "redis") == "redis" and options.get("storage"):
        yield "gcsFaultToleranceOptions.storage is for the rocksdb backend"


def _autoscaler(cluster: dict[str, Any], groups: dict[str, dict[str, Any]]) -> Iterator[str]:
    variable = environment(cluster["headGroupSpec"]).get(_AUTOSCALER_V2_VARIABLE)
    if variable and not autoscaled(cluster) and variable.get("value") in ("1", "true"):
        yield f"head: {_AUTOSCALER_V2_VARIABLE} without enableInTreeAutoscaling"
    options = cluster.get("autoscalerOptions", {})
    if variable and autoscaled(cluster) and options.get("version"):
        yield f"head: {_AUTOSCALER_V2_VARIABLE} beside autoscalerOptions.version: only the latter"
    if options.get("idleTimeoutSeconds", 0) < 0:
        yield "autoscalerOptions.idleTimeoutSeconds must not be negative"
    if autoscaler_v2(cluster):
        for name, group in groups.items():
            if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
                yield f"{name}: restartPolicy must be Never with autoscaler v2"


def _head(head: dict[str, Any], spec: dict[str, Any]) -> Iterator[str]:
    if head.get("headService", {}).get("metadata", {}).get("name"):
        yield "headService must not have a name"
    names = [port.get("name", "") for port in head["template"]["spec"]["containers"][0].get("ports", [])]
    if "serveService" not in spec and not any(name == "serve" or name.startswith("serve-") for name in names):
        yield "head: no container port is called `serve`, so there would be no Service"


def _upgrade(spec: dict[str, Any]) -> Iterator[str]:
    strategy = spec.get("upgradeStrategy", {})
    kind, options = strategy.get("type"), strategy.get("clusterUpgradeOptions")
    if kind is not None and kind not in _UPGRADES:
        yield f"upgradeStrategy.type {kind!r} is none of {', '.join(_UPGRADES)}"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    if not autoscaled(spec["rayClusterConfig"]):
        yield "an incremental upgrade needs enableInTreeAutoscaling"
    if options is None:
        yield "an incremental upgrade needs clusterUpgradeOptions"
        return
    surge, step = options.get("maxSurgePercent", 100), options["stepSizePercent"]
    if not 0 <= surge <= 100 or not 0 <= step <= surge:
        yield f"0 <= stepSizePercent ({step}) <= maxSurgePercent ({surge}) <= 100 must hold"
    if options["intervalSeconds"] <= 0 or not options["gatewayClassName"]:
        yield "clusterUpgradeOptions: intervalSeconds must be positive and gatewayClassName set"
