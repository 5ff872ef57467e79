"""Every shipped manifest, rendered by its overlay, fits the schemas and the settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.k8s.check import DIRECTORIES, ROOT, only, pods, problems
from tests.k8s.kustomize import Manifest, by_kubectl, render
from tests.k8s.service import ROLES, _volume, embedded, environment

READ_ONLY_ROOT, MODEL_CACHE = (ROOT / "components" / name for name in ("read-only-root", "model-cache"))
"""Components that no overlay uses."""


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_what_is_shipped_is_right(directory: Path) -> None:
    """The checks find no mistake; test_mistakes.py shows which mistakes they find."""
    assert problems(render(directory)) == []


@pytest.mark.skipif(by_kubectl(ROOT / "base") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_the_merge_is_kubectls(directory: Path) -> None:
    def ordered(manifests: list[Manifest] | None) -> list[Manifest]:
        return sorted(manifests or [], key=lambda one: (one["kind"], one["metadata"]["name"]))

    assert ordered(render(directory)) == ordered(by_kubectl(directory))


def with_components(folder: Path, directory: Path, *components: Path) -> list[Manifest]:
    """Return the manifests of a kustomization that a user would write, without a mistake."""
    kind = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}
    used = {"resources": [str(directory)], "components": list(map(str, components))}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kind | used))
    manifests = render(folder)
    assert problems(manifests) == []
    return manifests


def test_a_cache_that_survives_pods(tmp_path: Path) -> None:
    """Engines keep models, and digests of weights, on one volume, with a read-only root as well."""
    manifests = with_components(tmp_path, ROOT / "overlays" / "gpu", READ_ONLY_ROOT, MODEL_CACHE)
    (claim,) = only(manifests, "PersistentVolumeClaim")
    groups = only(manifests, "RayService")[0]["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    for group in (one for one in groups if one["groupName"] != "router"):
        variables = {one["name"]: one.get("value") for one in group["template"]["spec"]["containers"][0]["env"]}
        for variable in ("VLLM_CACHE_ROOT", "HF_HOME"):
            volume = _volume(group, variables[variable])
            assert volume is not None
            assert volume["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda path: path.name)
def test_a_root_that_cannot_be_written(tmp_path: Path, directory: Path) -> None:
    """On each variant, no container can write its root; /tmp, /dev/shm and HOME are on volumes."""
    has_it = directory.name == "openshift"
    manifests = with_components(tmp_path, directory, *(() if has_it else (READ_ONLY_ROOT,)))
    cluster = only(manifests, "RayService")[0]["spec"]["rayClusterConfig"]
    templates = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    found = [(pod, container) for pod in templates for container in pod["containers"]]
    for pod, container in [*found, (templates[0], cluster["autoscalerOptions"])]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        volumes = {one["name"] for one in pod["volumes"] if "emptyDir" in one}
        mounts = {one["mountPath"] for one in container["volumeMounts"] if one["name"] in volumes}
        (home,) = (one["value"] for one in container["env"] if one["name"] == "HOME")
        assert {"/tmp", home} <= mounts
        assert "/dev/shm" in mounts or container not in pod["containers"]
    for redis in only(manifests, "StatefulSet"):
        assert redis["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


def test_nothing_is_left_out() -> None:
    used = {path for directory in (*DIRECTORIES, READ_ONLY_ROOT, MODEL_CACHE) for path in _files(directory)}
    assert set(ROOT.rglob("*.yaml")) - used == set()


def _files(directory: Path) -> set[Path]:
    path = directory / "kustomization.yaml"
    content = yaml.safe_load(path.read_text())
    names = [
        *content.get("resources", []),
        *content.get("components", []),
        *(p["path"] for p in content.get("patches", [])),
    ]
    inner = [(directory / name).resolve() for name in names]
    return {path}.union(*(_files(one) if one.is_dir() else {one} for one in inner))


def test_the_variants() -> None:
    rendered = {directory.name: render(directory) for directory in DIRECTORIES}
    service = {name: only(manifests, "RayService")[0]["spec"] for name, manifests in rendered.items()}
    upgrades = {name: spec["upgradeStrategy"]["type"] for name, spec in service.items()}
    assert upgrades == {
        "base": "None",
        "cpu": "None",
        "cpu-store": "None",
        "gpu": "None",
        "gpu-incremental": "NewClusterWithIncrementalUpgrade",
        "openshift": "None",
        "rdma": "None",
    }
    monitored = {name for name, manifests in rendered.items() if only(manifests, "PodMonitor")}
    assert monitored == {"gpu", "gpu-incremental", "openshift", "rdma"}
    for name, spec in service.items():
        settings = embedded({"spec": spec})[1]
        cluster = spec["rayClusterConfig"]
        assert cluster["autoscalerOptions"]["version"] == "v2"
        assert cluster["gcsFaultToleranceOptions"]["backend"] == "redis"
        assert bool(settings.decode.num_gpus) == (name in monitored)
        (rdma,) = {
            "rdma/hca_shared_devices_a" in group["template"]["spec"]["containers"][0]["resources"]["limits"]
            for group in cluster["workerGroupSpecs"]
            if group["groupName"] != "router"
        }
        assert rdma == (name == "rdma")
        assert settings.store.enabled == (name == "cpu-store")
        assert set(pods(rendered[name])) == {"head", *ROLES, "tandem-redis"}
        if name in ("gpu", "gpu-incremental", "rdma"):
            # A transfer costs per run of blocks, and vLLM's default is 16 tokens a block.
            assert settings.engine["block_size"] == 128
            for group in cluster["workerGroupSpecs"][1:]:
                assert environment(group)["UCX_RCACHE_MAX_UNRELEASED"]["value"] == "1024"


def test_users_are_fixed_except_where_the_cluster_assigns_them() -> None:
    """No pod of the overlay `openshift` has a fixed user or group; it writes below /tmp only."""
    for directory in DIRECTORIES:
        manifests = render(directory)
        cluster = only(manifests, "RayService")[0]["spec"]["rayClusterConfig"]
        groups = (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])
        assigned = directory.name == "openshift"
        for spec in (one["template"]["spec"] for one in (*groups, only(manifests, "StatefulSet")[0]["spec"])):
            assert {"runAsUser", "fsGroup"} & spec["securityContext"].keys() == (
                set() if assigned else {"runAsUser", "fsGroup"}
            )
            assert spec["securityContext"]["runAsNonRoot"]
        homes = [environment(group).get("HOME", {}).get("value") for group in groups]
        assert homes == ["/tmp" if assigned else None] * len(groups)


def test_secrets_go_to_who_needs_them() -> None:
    """Routers get API keys, engines the peers' secret, the head nothing; no manifest has a
    value.
    """
    (service,) = only(render(ROOT / "overlays" / "gpu"), "RayService")
    cluster = service["spec"]["rayClusterConfig"]
    groups = {"head": cluster["headGroupSpec"]} | {one["groupName"]: one for one in cluster["workerGroupSpecs"]}
    secrets = {
        name: {
            one["name"]: one["valueFrom"]["secretKeyRef"]["name"]
            for one in group["template"]["spec"]["containers"][0].get("env", [])
            if "valueFrom" in one
        }
        for name, group in groups.items()
    }
    engine = {"TANDEM_PEER_SECRET": "tandem-auth", "HF_TOKEN": "tandem-hub"}
    router = dict.fromkeys(("TANDEM_API_KEYS", "TANDEM_OPERATOR_KEYS"), "tandem-auth")
    assert secrets == {"head": {}, "router": router, "prefill": engine, "decode": engine}
    assert only(render(ROOT / "overlays" / "gpu"), "Secret") == []


UNREACHED = """
import time
from types import SimpleNamespace
from ray.serve._private.deployment_state import DeploymentState, ReplicaStartupStatus, ReplicaState
from ray.serve._private.deployment_state import ReplicaStateContainer

replica = SimpleNamespace(
    replica_id="r", version="v", update_state=lambda _: None, _start_time=time.time() - 60,
    check_started=lambda: (ReplicaStartupStatus.PENDING_ALLOCATION, None),
)
killed = []
state = SimpleNamespace(_replicas=ReplicaStateContainer(), _stop_replica=lambda one, graceful_stop: killed.append(one))
state._replicas.add(ReplicaState.RECOVERING, replica)
DeploymentState._check_startup_replicas(state, ReplicaState.RECOVERING, stop_on_slow=True)
print(len(killed), "killed")
"""
"""What Serve's controller does with a replica that it has not reached for a minute after its
start."""


@pytest.mark.parametrize("folder", ["base", "overlays/openshift"])
def test_a_new_controller_does_not_kill_a_router_that_it_reaches_late(folder: str) -> None:
    """After a restart of Redis it took Serve 30 s and more, while the router served requests."""
    (service,) = only(render(ROOT / folder), "RayService")
    head = environment(service["spec"]["rayClusterConfig"]["headGroupSpec"])
    own = os.environ | {name: one["value"] for name, one in head.items() if "value" in one}
    ran = subprocess.run([sys.executable, "-c", UNREACHED], env=own, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "0 killed"
