"""Next step of an upgrade in place, from the objects of the Kubernetes API and Serve's state.

Under `upgradeStrategy: None`, KubeRay 1.7 passes no change of `rayClusterConfig` to the RayCluster.
It copies all of it when the RayCluster's annotation `VERSION` is not the operator's version
(`shouldUpdateCluster` in its rayservice_controller.go); running pods stay. The annotation `MARK` of
a pod is the digest of the template that made it: pods inherit it from their template.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

VERSION, NOT_TAKEN = "ray.io/kuberay-version", "none"
NOT_UPDATED = "KubeRay's operator has not updated the RayCluster: does it run?"
CHANGED = "the RayService has changed since this run began"
MARK = "tandem/template"
HEAD = "headgroup"
OF_PODS = ("cluster", "labels", "rayStartParams", "resources", "template")

AMOUNTS = ("requests", "limits", "sizeLimit")
"""Keys of quantities, which the operator's copy writes in their shortest form: 0.5 as 500m."""
UNITS = {"m": Fraction(1, 1000)} | {one: Fraction(1000) ** number for number, one in enumerate(("", *"kMGTPE"))}
UNITS |= {f"{one}i": Fraction(1024) ** number for number, one in enumerate("KMGTPE", 1)}

Object = dict[str, Any]
Command = tuple[str, ...]


@dataclass(frozen=True)
class Pod:
    name: str
    group: str
    ip: str | None
    image: str
    mark: str | None
    ready: bool
    ending: bool
    pending: bool

    @property
    def deletion(self) -> Command:
        # KubeRay's init container ignores SIGTERM and would take the whole grace period.
        return ("delete", "pod", self.name, "--wait=false", *(["--grace-period=1"] if self.pending else []))


@dataclass(frozen=True)
class Step:
    """kubectl commands to run, or else what to wait for; with neither, the upgrade has ended."""

    commands: tuple[Command, ...] = ()
    awaited: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """RayService, its active RayCluster and pods, and Serve's applications (empty: unknown)."""

    service: Object
    cluster: Object
    pods: tuple[Pod, ...]
    applications: Object

    @cached_property
    def wanted(self) -> dict[str, Object]:
        return _groups(self.service["spec"]["rayClusterConfig"])

    @cached_property
    def live(self) -> dict[str, Object]:
        return _groups(self.cluster["spec"])

    @cached_property
    def deployments(self) -> dict[str, Object]:
        found = self.applications.items()
        return {f"{app}/{name}": one for app, its in found for name, one in its["deployments"].items()}

    def busy(self, pod: Pod) -> bool:
        """Return whether the pod may hold requests; True if Serve's state is incomplete."""
        states = self.deployments.values()
        if not states or any(one["target_num_replicas"] and not one["replicas"] for one in states):
            return True
        found = [replica for one in states for replica in one["replicas"] if replica["node_ip"] == pod.ip]
        return any(replica["state"] != "STARTING" for replica in found)

    def in_group(self, name: str) -> list[Pod]:
        return [one for one in self.pods if one.group == name and not one.ending]

    def mark(self, pod: Pod) -> str | None:
        """Return the digest of the pod's template; None if unknown."""
        live = self.live.get(pod.group)
        if pod.mark or live is None or _mark(live["template"]) or pod.image != _image(live["template"]):
            return pod.mark
        return _digest(live)  # no push yet: the RayCluster's template made the pod

    def current(self, pod: Pod) -> bool:
        return self.mark(pod) == _digest(self.wanted[pod.group])

    def replaceable(self, name: str) -> bool:
        """Return whether new pods of the group get the wanted template."""
        wanted, live = _digest(self.wanted[name]), self.live.get(name)
        return live is not None and wanted in (_mark(live["template"]), _digest(live))

    def old(self) -> list[Pod]:
        """Return the pods to replace in order: routers, engines, and the head, which a bad template
        must not end.

        Groups of engines take turns by their share of replaced pods, so that each release has some
        of both roles: engines exchange KV only within a release.
        """
        keeps_state = self.service["spec"]["rayClusterConfig"].get("gcsFaultToleranceOptions")
        workers = [name for name in self.wanted if name != HEAD]
        turns = []
        for name in [*workers, *([HEAD] if keeps_state else [])]:
            pods = [one for one in self.in_group(name) if not self.current(one) or self.busy(one)]
            old = [one for one in pods if not self.current(one)]
            part = 0 if name == workers[0] else 2 if name == HEAD else 1
            for number, one in enumerate(old, start=len(pods) - len(old)):
                turns.append((part, Fraction(2 * number + 1, len(pods)), one))
        return [one for *_, one in sorted(turns, key=lambda turn: turn[:2])]


def read(objects: list[Object], name: str) -> State:
    """Return the RayService's state without Serve. KeyError: it has no RayCluster."""
    found = {(one["kind"], one["metadata"]["name"]): one for one in objects}
    service = found.get(("RayService", name), {})
    cluster = service.get("status", {}).get("activeServiceStatus", {}).get("rayClusterName")
    pods = [one for one in objects if one["metadata"].get("labels", {}).get("ray.io/cluster") == cluster]
    return State(service, found["RayCluster", cluster], tuple(_pod(one) for one in pods if one["kind"] == "Pod"), {})


def refusals(state: State, *, allow_gap: bool) -> Iterator[str]:
    """Yield why an upgrade must not start, with the remedy."""
    spec = state.service["spec"]
    config, strategy = spec["rayClusterConfig"], spec.get("upgradeStrategy", {}).get("type")
    if strategy != "None":
        yield f"upgradeStrategy is {strategy}: `kubectl apply` of changed templates upgrades, through a second cluster"
    if state.service["status"].get("pendingServiceStatus", {}).get("rayClusterName"):
        yield "KubeRay is changing to a second cluster: wait until that has ended"
    if not config.get("enableInTreeAutoscaling"):
        yield "enableInTreeAutoscaling is off: a new pod would start only when the old one is gone"
    if config.get("rayVersion") != state.cluster["spec"].get("rayVersion"):
        yield "rayVersion changes, and one cluster cannot have two: upgrade through a second cluster"
    for name in sorted({one.group for one in state.pods} - {*state.wanted}):
        yield f"group {name} has pods: the autoscaler fails on pods of removed groups; keep it until they have ended"
    for name in sorted(state.wanted.keys() & state.live.keys() - {HEAD}):
        pods, most = state.in_group(name), state.wanted[name]["maxReplicas"]
        if most < len(pods):
            yield f"group {name}: maxReplicas {most} for {len(pods)} pods: the autoscaler would not drain them"
        elif most and not state.live[name]["maxReplicas"]:
            yield f"group {name} is retired (maxReplicas 0 in the RayCluster) and would return: set it to 0 here too"
        elif not allow_gap and sum(map(state.busy, pods)) >= most and any(one.group == name for one in state.old()):
            yield f"group {name}: maxReplicas {most} leaves no room for one more pod: raise it, or use --allow-gap"


def next_step(state: State, *, pushed: bool) -> Step:
    """Return what to do now. All progress is in the objects, but one run pushes only once."""
    if state.cluster["metadata"].get("annotations", {}).get(VERSION) == NOT_TAKEN:
        return Step(awaited=(NOT_UPDATED,))
    if not pushed and differs(state):
        return Step(tuple(push(state)))
    old = state.old()
    if not all(map(state.replaceable, {one.group for one in old})):
        return Step(awaited=(CHANGED,))  # a deleted pod would return with another template
    # Spare and broken pods first: nothing depends on them, even when the service is not whole.
    idle = [one for one in old if one.group != HEAD and not state.busy(one)]
    awaited = () if idle else tuple(lacks(state))
    return Step(awaited=awaited) if awaited else Step(tuple(one.deletion for one in (idle or old)[:1]))


def differs(state: State) -> bool:
    """Return whether the RayCluster's spec must change: it differs, or `replicas` is too low."""
    workers = {name: one.get("replicas", 0) for name, one in state.live.items() if name != HEAD}
    few = any(replicas < len(state.in_group(name)) for name, replicas in workers.items())
    wanted, live = (
        {name: _unmarked(one) | {"replicas": None, "scaleStrategy": None} for name, one in groups.items()}
        for groups in (state.wanted, state.live)
    )
    return bool(_bare(wanted) != _bare(live) or (few and state.old()))


def push(state: State) -> Iterator[Command]:
    """Yield the commands that bring the RayService's spec to the RayCluster."""
    patch: list[Object] = []
    for number, (name, group) in enumerate(state.wanted.items()):
        path = "/spec/rayClusterConfig/" + (f"workerGroupSpecs/{number - 1}" if number else "headGroupSpec")
        pods = state.in_group(name)
        if number:
            patch.append({"op": "test", "path": f"{path}/groupName", "value": name})
        # With fewer replicas than pods, the operator would start no pod beside one that ends.
        if number and group.get("replicas", 0) < len(pods):
            patch.append({"op": "add", "path": f"{path}/replicas", "value": len(pods)})
        metadata = _unmarked(group)["template"]["metadata"]
        metadata["annotations"][MARK] = _digest(group)
        patch.append({"op": "add", "path": f"{path}/template/metadata", "value": metadata})
        if unmarked := [one.name for one in pods if not one.mark and state.mark(one)]:
            yield ("annotate", "pods", *unmarked, f"{MARK}={_digest(state.live[name])}")
    yield ("patch", "rayservices.ray.io", state.service["metadata"]["name"], "--type=json", "-p", json.dumps(patch))
    cluster = state.cluster["metadata"]["name"]
    yield ("annotate", "rayclusters.ray.io", cluster, f"{VERSION}={NOT_TAKEN}", "--overwrite")


def lacks(state: State) -> Iterator[str]:
    """Yield the reasons not to replace a pod now: all replicas must run on pods that are Ready."""
    for pod in state.pods:
        if pod.ending or (pod.group == HEAD and not pod.ready):
            yield f"{pod.name} {'is ending' if pod.ending else 'is not Ready'}"
    if not state.applications:
        yield "Serve on the head does not answer"
    for name, application in state.applications.items():
        if application["status"] in ("DEPLOY_FAILED", "UNHEALTHY"):
            yield f"application {name} is {application['status']}: {application['message']}"
    ready = {one.ip for one in state.pods if one.ready}
    for name, deployment in state.deployments.items():
        running = [one for one in deployment["replicas"] if one["state"] == "RUNNING" and one["node_ip"] in ready]
        if len(running) < deployment["target_num_replicas"]:
            yield f"{name}: {len(running)} of {deployment['target_num_replicas']} replicas run on Ready pods"


def _groups(spec: Object) -> dict[str, Object]:
    """Return the groups by KubeRay's label; cluster-wide options are part of the head's."""
    wide = {key: value for key, value in spec.items() if key not in ("headGroupSpec", "workerGroupSpecs", "suspend")}
    workers = {one["groupName"]: one for one in spec.get("workerGroupSpecs", [])}
    return {HEAD: spec["headGroupSpec"] | {"cluster": wide}, **workers}


def _digest(group: Object) -> str:
    of_pods = {key: value for key, value in _unmarked(group).items() if key in OF_PODS}
    return hashlib.sha256(json.dumps(_bare(of_pods), sort_keys=True).encode()).hexdigest()[:16]


def _bare(value: Any, amount: bool = False) -> Any:
    """Remove empty values and write numbers as text, as the operator's copy may; unify amounts."""
    if isinstance(value, dict):
        inner = {key: _bare(one, amount or key in AMOUNTS) for key, one in value.items()}
        return {key: one for key, one in inner.items() if one not in (None, "", {}, [])}
    if isinstance(value, list):
        return [_bare(one) for one in value]
    return _amount(str(value)) if amount and value is not None else value and str(value)


def _amount(text: str) -> str:
    number, unit = re.fullmatch(r"([\d.]*)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    try:
        return str(Fraction(number) * UNITS[unit])
    except (KeyError, ValueError):
        return text


def _mark(made: Object) -> str | None:
    mark: str | None = (made.get("metadata", {}).get("annotations") or {}).get(MARK)
    return mark


def _unmarked(group: Object) -> Object:
    metadata = group["template"].get("metadata", {})
    annotations = {key: value for key, value in (metadata.get("annotations") or {}).items() if key != MARK}
    return group | {"template": group["template"] | {"metadata": metadata | {"annotations": annotations}}}


def _image(made: Object) -> str:
    return str(made["spec"]["containers"][0]["image"])


def _pod(pod: Object) -> Pod:
    metadata, status = pod["metadata"], pod.get("status", {})
    group, ending = metadata["labels"].get("ray.io/group", ""), "deletionTimestamp" in metadata
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions", []))
    pending = status.get("phase") == "Pending"
    return Pod(metadata["name"], group, status.get("podIP"), _image(pod), _mark(pod), ready, ending, pending)
