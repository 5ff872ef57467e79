"""`tandem upgrade` with a stand-in for kubectl that serves the operator's recorded objects."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app import cli
from app.upgrade import __main__ as command
from app.upgrade.plan import MARK, Step, next_step, read
from tests.k8s import fake_kubectl
from tests.k8s.check import ROOT, only
from tests.k8s.kustomize import render
from tests.k8s.recorded import CLUSTER
from tests.k8s.recorded import pod as recorded_pod

REPLICAS = {"router": 1, "prefill": 1, "decode": 2}


@pytest.fixture(scope="module")
def started() -> str:
    """Return the cluster of the overlay cpu, scaled up to two pods of decode."""
    (service,) = only(render(ROOT / "overlays" / "cpu"), "RayService")
    config = service["spec"]["rayClusterConfig"]
    config["workerGroupSpecs"][2]["maxReplicas"] = 3
    service["status"] = {"activeServiceStatus": {"rayClusterName": CLUSTER}}
    metadata = {"name": CLUSTER, "annotations": {"ray.io/kuberay-version": "v1.7.0"}}
    state: dict[str, Any] = {
        "service": service,
        "cluster": {"kind": "RayCluster", "metadata": metadata, "spec": copy.deepcopy(config)},
        "recorded": {role: recorded_pod(role) for role in REPLICAS} | {"headgroup": recorded_pod("head")},
        "deployments": {
            name: {
                "target_num_replicas": count,
                "replicas": [{"state": "STARTING", "node_ip": None, "asked": True}] * count,
            }
            for name, count in REPLICAS.items()
        },
        "pods": [],
        "log": [],
        "made": 0,
        "cut": 0,
        "operator": True,
        "stuck": "",
        "serving": True,
        "context": "ours",
        "begun_in": "ours",
    }
    state = json.loads(json.dumps(state))
    state["cluster"]["spec"]["workerGroupSpecs"][2]["replicas"] = 2  # by the autoscaler
    for _ in range(7):  # the service starts
        fake_kubectl.advance(state)
    return json.dumps(state)


class Cluster:
    """The file behind the stand-in, and the command under test."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> dict[str, Any]:
        return json.loads(self.file.read_text())

    def write(self, state: dict[str, Any]) -> None:
        self.file.write_text(json.dumps(state))

    def apply(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Apply a changed overlay: `change` gets the RayService's rayClusterConfig, unmarked."""
        state = self.read()
        config = state["service"]["spec"]["rayClusterConfig"]
        for group in (config["headGroupSpec"], *config["workerGroupSpecs"]):
            group["template"]["metadata"].pop("annotations", None)
        change(config)
        self.write(state)

    def set(self, **values: Any) -> None:
        self.write(self.read() | {"context": "ours", "log": []} | values)

    def images(self) -> dict[str, str]:
        return {one["metadata"]["name"]: one["spec"]["containers"][0]["image"] for one in self.read()["pods"]}

    def deleted(self) -> list[str]:
        """Return the groups of deleted pods with replicas; all were alone, in a whole service."""
        log = self.read()["log"]
        assert all(whole for name, whole, replicas in log if replicas), log
        return [name.split("-")[0] for name, _, replicas in log if replicas or "headgroup" in name]


@pytest.fixture
def cluster(started: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!{sys.executable} -IS\n{Path(fake_kubectl.__file__).read_text(encoding='utf-8')}")
    kubectl.chmod(0o755)
    found = Cluster(tmp_path / "cluster.json")
    found.file.write_text(started)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_CLUSTER", str(found.file))
    clock = itertools.count()
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda _: None))
    monkeypatch.setattr(cli, "find_spec", lambda name: None)  # neither Ray nor vLLM is needed
    return found


def upgrade(*options: str) -> int:
    return cli.main(["upgrade", "--context", "ours", "--timeout-s", "40", *options])


def image(name: str, *, of: tuple[str, ...] = ("headgroup", *REPLICAS)) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        named = {one["groupName"]: one for one in config["workerGroupSpecs"]} | {"headgroup": config["headGroupSpec"]}
        for group in of:
            named[group]["template"]["spec"]["containers"][0]["image"] = name

    return change


def test_each_pod_is_replaced_alone_and_the_head_last(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    before = cluster.images()
    cluster.apply(image("tandem:new"))
    assert upgrade("--plan") == 0
    plan = capsys.readouterr().out
    assert cluster.images() == before
    assert cluster.read()["log"] == []
    assert plan.count("kubectl -n tandem delete pod ") == len(before) == 5
    assert upgrade() == 0
    assert cluster.read()["cut"] == 0
    assert cluster.deleted() == ["router", "decode", "prefill", "decode", "headgroup"]
    assert set(cluster.images().values()) == {"tandem:new"}
    assert len(cluster.images()) == 5 + 3, "a spare pod in each group"
    cluster.apply(image("tandem:new"))  # the same overlay again, which removes the marks
    capsys.readouterr()
    assert upgrade() == 0
    assert capsys.readouterr().out.startswith("Nothing to do")


def test_a_run_stays_in_its_cluster(cluster: Cluster) -> None:
    """Another shell changes kubectl's current context meanwhile."""
    cluster.apply(image("tandem:new"))
    assert cli.main(["upgrade", "--timeout-s", "40"]) == 0
    cluster.set(context="", begun_in="")  # in a pod
    assert cli.main(["upgrade", "--timeout-s", "40"]) == 0


def add_variable(config: dict[str, Any]) -> None:
    added = {"name": "UCX_TLS", "value": "tcp"}
    config["workerGroupSpecs"][1]["template"]["spec"]["containers"][0]["env"].append(added)


def rewrite_quantities(config: dict[str, Any]) -> None:
    """The API server keeps the text of a RayService; the operator writes its own."""
    resources = config["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]
    assert resources["requests"] == {"cpu": "500m", "memory": "2Gi"}
    resources["requests"] = {"cpu": 0.5, "memory": "2048Mi"}


# name: change, whether the operator answers, exit status, groups of deleted pods, output
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], bool, int, list[str], str]] = {
    "a variable": (add_variable, True, 0, ["prefill"], ""),
    "limits": (lambda config: config["workerGroupSpecs"][2].update(maxReplicas=6), True, 0, [], ""),
    "equal quantities": (rewrite_quantities, True, 0, [], "Nothing to do"),
    "a silent operator": (image("tandem:new"), False, 1, [], "operator has not updated the RayCluster"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_change_deletes(cluster: Cluster, capsys: pytest.CaptureFixture[str], name: str) -> None:
    change, operator, status, deleted, text = CHANGES[name]
    cluster.apply(change)
    cluster.set(operator=operator)
    assert upgrade() == status
    assert cluster.deleted() == deleted
    assert bool(cluster.read()["log"]) == bool(deleted)
    assert text in "".join(capsys.readouterr())
    if name == "limits":
        groups = cluster.read()["cluster"]["spec"]["workerGroupSpecs"]
        assert [(one["replicas"], one["maxReplicas"]) for one in groups] == [(1, 2), (1, 2), (2, 6)]


def test_stopped_at_a_deadline_and_continued(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.apply(image("tandem:new"))
    cluster.set(stuck="decode")
    assert upgrade("--timeout-s", "20") == 1
    assert "decode: 1 of 2 replicas run on Ready pods" in capsys.readouterr().err
    assert cluster.deleted() == ["router", "decode"]
    state = cluster.read()
    for pod in state["pods"]:  # its engine starts after all
        pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    for replica in state["deployments"]["decode"]["replicas"]:
        replica["state"] = "RUNNING"
    cluster.write(state)
    cluster.set(stuck="")
    assert upgrade() == 0
    assert cluster.deleted() == ["prefill", "decode", "headgroup"]
    assert set(cluster.images().values()) == {"tandem:new"}


def test_a_broken_image_ends_no_second_pod_and_is_undone(cluster: Cluster) -> None:
    before = cluster.images()
    cluster.apply(image("broken"))
    assert upgrade("--timeout-s", "20") == 1
    assert cluster.deleted() == ["router"]
    cluster.set()
    cluster.apply(image("tandem:0.1.0-cpu"))
    assert upgrade() == 0
    assert cluster.deleted() == []
    assert set(cluster.images().values()) == set(before.values())
    assert len(before.keys() & cluster.images().keys()) == len(before) - 1, "pods that fit were kept"


def test_an_overlay_that_changes_during_a_run_ends_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deleted pods would return with the template that was pushed, again and again."""
    sleeps = itertools.count()

    def sleep(_: float) -> None:
        if next(sleeps) == 4:
            cluster.apply(image("tandem:newer"))

    monkeypatch.setattr(command.time, "sleep", sleep)
    cluster.apply(image("tandem:new"))
    assert upgrade() == 1
    assert "the RayService has changed" in capsys.readouterr().err
    assert len(cluster.deleted()) <= 2
    cluster.set()
    assert upgrade() == 0
    assert set(cluster.images().values()) == {"tandem:newer"}


def step_by_step(cluster: dict[str, Any], beside: Callable[[], object] = lambda: None) -> list[tuple[str, bool]]:
    """Take each step in a run of its own; `beside` happens before the operator takes a push.

    Return the deleted pods, and whether each was alone, in a whole service.
    """
    for _ in range(100):
        state = replace(
            read(copy.deepcopy(fake_kubectl.run(cluster, "get")["items"]), "tandem"),
            applications=fake_kubectl.run(cluster, "exec")["applications"] if cluster["serving"] else {},
        )
        step = next_step(state, pushed=False)
        for one in step.commands:
            fake_kubectl.run(cluster, *one)
        if len(step.commands) > 1:
            beside()
        if step == Step():
            break
    assert cluster["cut"] == 0, "a pod ended before its replica had moved"
    return [(name, whole) for name, whole, _ in cluster["log"]]


def test_interrupted_before_every_step(started: str) -> None:
    """All progress is in the objects: a new run for each step does what one run does."""
    cluster = json.loads(started)
    image("tandem:new")(cluster["service"]["spec"]["rayClusterConfig"])
    names = ("router-2", "decode-4", "prefill-3", "decode-5", "headgroup-1")
    assert step_by_step(cluster) == [(name, True) for name in names]
    assert {one["spec"]["containers"][0]["image"] for one in cluster["pods"]} == {"tandem:new"}


def test_a_push_by_a_new_operator_is_recognised(started: str) -> None:
    """It brings the new image without a mark, and fewer `replicas` than there are pods."""
    cluster = json.loads(started)
    image("tandem:new")(cluster["service"]["spec"]["rayClusterConfig"])
    assert cluster["service"]["spec"]["rayClusterConfig"]["workerGroupSpecs"][2]["replicas"] == 1
    cluster["cluster"]["spec"] = copy.deepcopy(cluster["service"]["spec"]["rayClusterConfig"])
    assert len(step_by_step(cluster)) == 5


def test_a_pod_that_starts_during_the_push_is_replaced(started: str) -> None:
    """It has the old template, and no mark."""
    cluster = json.loads(started)
    decode = copy.deepcopy(cluster["cluster"]["spec"]["workerGroupSpecs"][2])
    changed = cluster["service"]["spec"]["rayClusterConfig"]["workerGroupSpecs"][2]
    changed["template"]["spec"]["containers"][0]["env"].append({"name": "UCX_TLS", "value": "tcp"})
    once = iter([decode])
    deleted = step_by_step(cluster, lambda: [fake_kubectl.create(cluster, one, "decode", ready=False) for one in once])
    assert sorted(name for name, _ in deleted) == ["decode-4", "decode-5", "decode-6"]


def test_a_second_application_with_equal_names_hides_no_replica(started: str) -> None:
    cluster = json.loads(started)
    state = read(fake_kubectl.run(cluster, "get")["items"], "tandem")
    applications = fake_kubectl.run(cluster, "exec")["applications"]
    none = {name: one | {"target_num_replicas": 0, "replicas": []} for name, one in cluster["deployments"].items()}
    state = replace(state, applications=applications | {"other": applications["tandem"] | {"deployments": none}})
    assert sum(map(state.busy, state.pods)) == sum(REPLICAS.values())


def test_without_redis_the_head_stays(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    state = cluster.read()
    for config in (state["service"]["spec"]["rayClusterConfig"], state["cluster"]["spec"]):
        del config["gcsFaultToleranceOptions"]
    cluster.write(state)
    cluster.apply(image("tandem:new", of=("headgroup", "router")))
    assert upgrade() == 0
    assert "The head keeps its old pod" in capsys.readouterr().out
    assert cluster.deleted() == ["router"]


def retire_decode(state: dict[str, Any]) -> None:
    state["cluster"]["spec"]["workerGroupSpecs"][2] |= {"replicas": 0, "minReplicas": 0, "maxReplicas": 0}
    state["pods"] = [one for one in state["pods"] if "decode" not in one["metadata"]["name"]]


def config_of(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state["service"]["spec"]["rayClusterConfig"]
    return found


def decode_of(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config_of(state)["workerGroupSpecs"][2]
    return found


REFUSED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "upgradeStrategy": lambda state: state["service"]["spec"]["upgradeStrategy"].update(type="NewCluster"),
    "KubeRay": lambda state: state["service"]["status"].update(pendingServiceStatus={"rayClusterName": "tandem-z"}),
    "enableInTreeAutoscaling": lambda state: config_of(state).pop("enableInTreeAutoscaling"),
    "rayVersion": lambda state: config_of(state).update(rayVersion="2.61.0"),
    "group decode has pods": lambda state: config_of(state)["workerGroupSpecs"].pop(),
    "group decode: maxReplicas 0": lambda state: decode_of(state).update(replicas=0, minReplicas=0, maxReplicas=0),
    "group decode: maxReplicas 2": lambda state: decode_of(state).update(maxReplicas=2),
    "group decode is retired": retire_decode,
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_trap_is_refused(cluster: Cluster, capsys: pytest.CaptureFixture[str], message: str) -> None:
    cluster.apply(image("tandem:new"))
    state = cluster.read()
    REFUSED[message](state)
    cluster.write(state)
    assert upgrade() == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"refused: {message}")
    assert cluster.read()["log"] == []
    assert MARK not in cluster.file.read_text()


def test_a_gap_can_be_allowed(cluster: Cluster) -> None:
    cluster.apply(lambda config: config["workerGroupSpecs"][2].update(maxReplicas=2))
    state = cluster.read()
    image("tandem:new", of=("decode",))(state["service"]["spec"]["rayClusterConfig"])
    cluster.write(state)
    assert upgrade("--allow-gap") == 0
    assert cluster.read()["cut"] == 2
    assert cluster.deleted() == ["decode", "decode"]
