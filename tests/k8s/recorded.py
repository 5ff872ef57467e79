"""Labels of the pods that KubeRay 1.7.0 made from the overlay cpu on a cluster (2026-11-27)."""

from __future__ import annotations

from typing import Any

CLUSTER = "tandem-xxxxx"
COMMON = {
    "app.kubernetes.io/created-by": "kuberay-operator",
    "app.kubernetes.io/name": "kuberay",
    "ray.io/cluster": CLUSTER,
    "ray.io/is-ray-node": "yes",
    "tandem/service": "tandem",
}
HEAD = {"ray.io/group": "headgroup", "ray.io/identifier": f"{CLUSTER}-head", "ray.io/node-type": "head"}
WORKER = {
    "ray.io/identifier": f"{CLUSTER}-worker",
    "ray.io/node-type": "worker",
    "ray.io/serve": "true",
    "ray.io/worker-group-replica-index": "0",
}


def labels(role: str) -> dict[str, str]:
    """Return the labels of a role's pods, or of the `head`."""
    own = HEAD | {"ray.io/serve": "false"} if role == "head" else WORKER | {"ray.io/group": role}
    return COMMON | own | {"tandem/role": role}


def pod(role: str) -> dict[str, Any]:
    """Return what `tandem upgrade` reads of a pod, without its status."""
    spec = {"containers": [{"image": "tandem:0.1.0-cpu"}]}
    return {"kind": "Pod", "metadata": {"labels": labels(role)}, "spec": spec}
