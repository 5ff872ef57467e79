"""Deliberate mistakes, each in an otherwise valid manifest: the checks name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonpatch
import pytest
import yaml

from tests.k8s.check import ROOT, problems
from tests.k8s.kustomize import Manifest, render

CLUSTER = "/spec/rayClusterConfig"
ROUTER, PREFILL, DECODE = (f"{CLUSTER}/workerGroupSpecs/{number}" for number in range(3))
POD = "/template/spec"
RAY = f"{POD}/containers/0"


def put(path: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": path, "value": value}


def drop(path: str) -> dict[str, Any]:
    return {"op": "remove", "path": path}


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(ROOT / "overlays" / "gpu-incremental")


def mistaken(manifests: list[Manifest], kind: str, name: str, operation: dict[str, Any]) -> list[str]:
    hits = [one["kind"] == kind and one["metadata"]["name"] == name for one in manifests]
    assert sum(hits) == 1
    return problems(
        [jsonpatch.apply_patch(one, [operation]) if hit else one for one, hit in zip(manifests, hits, strict=True)]
    )


@pytest.mark.parametrize(
    ("kind", "name", "operation", "message"),
    [
        ("RayService", "tandem", put("/spec/serveConfigv2", ""), "'serveConfigv2' was unexpected"),
        ("RayService", "tandem", put("/metadata/label", {}), "metadata: 'label' was unexpected"),
        ("RayService", "tandem", drop(f"{DECODE}/groupName"), "'groupName' is a required property"),
        ("RayService", "tandem", put(f"{CLUSTER}/authOptions/mode", "password"), "'password' is not one of"),
        ("RayService", "tandem", put(f"{PREFILL}{RAY}/env/-", {"name": "HF_HOME", "value": "x"}), "occurs twice"),
        ("PodDisruptionBudget", "tandem-decode", put("/spec/minAvaliable", 1), "minAvaliable"),
        ("PodMonitor", "tandem", put("/spec/podMetricsEndpoints/0/pathh", "/"), "'pathh' was unexpected"),
    ],
)
def test_a_typo_in_a_field(
    manifests: list[Manifest], kind: str, name: str, operation: dict[str, Any], message: str
) -> None:
    """The API server would silently drop most of these."""
    (line,) = mistaken(manifests, kind, name, operation)
    assert line.startswith(f"{kind} {name}: ")
    assert message in line


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("app.main:build", "app.man:build", "exactly one must have import_path app.main:build"),
        ("max_model_len", "max_modle_len", "engine.max_modle_len: vLLM has no such argument"),
        ("lease_s", "lease", "transfer.lease: no such setting"),
        ("args:", "arg:", "applications.0.arg: Ray Serve has no such key"),
        ("host: 0.0.0.0", "host: 127.0.0.1", "http_options.host must be 0.0.0.0"),
        ("proxy_location: EveryNode", "proxy_location: HeadOnly", "proxy_location must be EveryNode"),
        ("port: 8000", "port: 8001", "port `serve` is 8000, but http_options.port 8001"),
        ("tandem/role: decode", "tandem/role: decoder", "must match one worker group, not none"),
        ("{tandem/role: router}", "{}", "must match one worker group, not router, prefill, decode"),
        ("tandem/role: router}", "tandem/role: router!}", "router.label_selector"),
        ("num_gpus: 2", "num_gpus: 4", "decode: num_gpus 4, but a pod has 2"),
        ("tensor_parallel_size: 2", "tensor_parallel_size: 4", "decode: num_gpus 2 for 4 ranks"),
        ("num_cpus: 4", "num_cpus: 16", "prefill: num_cpus 16, but a pod of prefill has 8"),
        ("max_replicas: 4", "max_replicas: 8", "prefill: 2 to 8 replicas, but group prefill has 2 to 4 pods"),
        (
            'policy: {policy_function: "actors.autoscaling.policy:ScaleByOngoing"}',
            "initial_replicas: 2",
            "prefill: autoscaling_config has no policy",
        ),
        ("placement: apart", "placement: any", "prefill: placement must be apart"),
        ("side_channel_port: 5600", "side_channel_port: 5601", "transfer.side_channel_port 5601"),
        ("http_port: 8100", "http_port: 8101", "port `router` is 8100, but router.http_port 8101"),
        ("http_host: 0.0.0.0", "http_host: 127.0.0.1", "router.http_host must be 0.0.0.0"),
        ("leave_s: 15", "leave_s: 10", "router.leave_s (10 s) must be longer than router's readiness probe"),
        ("rpc_port: 5700", "rpc_port: 5701", "port `rpc` is 5700, but prefill.rpc_port 5701"),
        ("rpc_port: 5700", "rpc_port: 0", "prefill.rpc_port 0: it must be fixed"),
        ("num_gpus: 1", "num_gpus: 1\n        data_parallel_size: 17", "data_parallel_size 17, but network-policies"),
        ("side_channel_port: 5600", "side_channel_port: 0", "transfer.side_channel_port must be fixed"),
        ("lease_s: 60", "lease_s: 120", "prefill.drain_s (120 s) must be longer than transfer.lease_s (120 s)"),
        ("lease_s: 60", "lease_s: 300", "idleTimeoutSeconds (300 s) must be longer than transfer.lease_s"),
        ("drain_s: 120", "drain_s: 240", "DRAIN_TIMEOUT_S (240 s) must be longer than prefill.drain_s (240 s)"),
        (
            "request_timeout_s: 600\n        drain_s: 120",
            "request_timeout_s: 600\n        drain_s: 240",
            "DRAIN_TIMEOUT_S (240 s) must be longer than router.drain_s (240 s)",
        ),
        ("leave_s: 15", "leave_s: 120", "prefill: prefill.drain_s (120 s) must be longer than router.leave_s (120 s)"),
        ("lease_s: 60", "lease_s: 60\n        node_lost_s: 300", "transfer.node_lost_s must be at least 720"),
        ("request_timeout_s: 600", "request_timeout_s: 700", "rayClusterDeletionDelaySeconds (660 s) must be longer"),
    ],
)
def test_the_embedded_configuration(manifests: list[Manifest], old: str, new: str, message: str) -> None:
    """Read as the launcher reads a file, and compared with the pods that carry it."""
    (service,) = (one for one in manifests if one["kind"] == "RayService")
    text = service["spec"]["serveConfigV2"]
    assert old in text
    found = mistaken(manifests, "RayService", "tandem", put("/spec/serveConfigV2", text.replace(old, new, 1)))
    assert any(message in line for line in found), found


def with_configuration(manifests: list[Manifest], change: Callable[[dict[str, Any]], None]) -> list[str]:
    """Return the problems after `change` of the application's arguments."""
    (service,) = (one for one in manifests if one["kind"] == "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    change(config["applications"][0]["args"])
    return mistaken(manifests, "RayService", "tandem", put("/spec/serveConfigV2", yaml.safe_dump(config)))


def test_data_parallel_ranks_share_the_gpus_of_a_pod(manifests: list[Manifest]) -> None:
    """A replica needs as many GPUs as it has ranks."""

    def change(arguments: dict[str, Any]) -> None:
        arguments["decode"] |= {"tensor_parallel_size": 1, "data_parallel_size": 2}

    assert with_configuration(manifests, change) == []


@pytest.mark.parametrize("num_gpus", [2, 4])
def test_engines_of_a_list_of_models_are_checked(manifests: list[Manifest], num_gpus: int) -> None:

    def change(arguments: dict[str, Any]) -> None:
        model = {key: arguments.pop(key) for key in ("model", "engine", "prefill", "decode")}
        model["decode"]["num_gpus"] = num_gpus
        arguments["models"] = [model]

    found = with_configuration(manifests, change)
    if num_gpus == 2:
        assert found == []
    else:
        assert any("decode: num_gpus 4, but a pod has 2" in line for line in found), found


PODS = [
    (put(f"{PREFILL}{POD}/terminationGracePeriodSeconds", 240), "terminationGracePeriodSeconds (240 s) must be"),
    (drop(f"{ROUTER}{POD}/terminationGracePeriodSeconds"), "terminationGracePeriodSeconds (30 s) must be longer"),
    (
        drop(f"{DECODE}{RAY}/env/4"),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S (30 s) must be longer than decode.drain_s",
    ),
    (put(f"{DECODE}{RAY}/env/4/value", "90"), "DRAIN_TIMEOUT_S (90 s) must be longer than decode.drain_s (120 s)"),
    (put(f"{CLUSTER}/autoscalerOptions/idleTimeoutSeconds", 60), "idleTimeoutSeconds (60 s) must be longer"),
    (drop("/spec/rayClusterDeletionDelaySeconds"), "rayClusterDeletionDelaySeconds (60 s) must be longer"),
    (put(f"{CLUSTER}/headGroupSpec/rayStartParams/num-cpus", "1"), 'num-cpus must be "0"'),
    (put(f"{DECODE}/labels/tandem~1role", "prefill"), "must match one worker group, not prefill, decode"),
    (
        drop(f"{CLUSTER}/headGroupSpec/rayStartParams/object-store-memory"),
        "head: rayStartParams object-store-memory",
    ),
    (put(f"{ROUTER}/rayStartParams/object-store-memory", "1207959552"), "/dev/shm has 1Gi, but Ray, vLLM and"),
    (put(f"{DECODE}{RAY}/readinessProbe/tcpSocket/port", 8000), "decode: the readiness probe must be tcpSocket"),
    (drop(f"{PREFILL}{RAY}/readinessProbe"), "prefill: the readiness probe must be tcpSocket on port `rpc`"),
    (put(f"{DECODE}{RAY}/env/2/value", "20000-20010"), "UCX_TCP_PORT_RANGE must be a range"),
]
OBJECTS = [
    ("PodDisruptionBudget", "tandem-decode", put("/spec/selector/matchLabels/tandem~1role", "d"), "selects no pod"),
    ("PodDisruptionBudget", "tandem-decode", put("/spec/minAvailable", 2), "2 of 2 pods: no node"),
    ("PodDisruptionBudget", "tandem-decode", put("/spec/minAvailable", "50%"), "whole number of minAvailable"),
    ("NetworkPolicy", "tandem-redis-in", put("/spec/podSelector/matchLabels/app", "x"), "selects no pod"),
    ("Service", "tandem-redis", put("/spec/selector/tandem~1role", "cache"), "selects no pod"),
    ("PodMonitor", "tandem", put("/spec/podMetricsEndpoints/0/port", "http"), "have no port 'http'"),
]


@pytest.mark.parametrize(
    ("kind", "name", "operation", "message"), [*(("RayService", "tandem", *row) for row in PODS), *OBJECTS]
)
def test_what_does_not_fit_together(
    manifests: list[Manifest], kind: str, name: str, operation: dict[str, Any], message: str
) -> None:
    """Timeouts in wrong order, labels that match nothing, a head with replicas."""
    found = mistaken(manifests, kind, name, operation)
    assert any(message in line for line in found), found


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (drop(f"{DECODE}{RAY}/volumeMounts/2"), "decode: no volume is mounted at or above store.path"),
        (put(f"{PREFILL}{POD}/volumes/2/emptyDir/sizeLimit", "16Gi"), "prefill: the volume of store.path has 16Gi"),
        (
            put(f"{PREFILL}{POD}/volumes/1/emptyDir/sizeLimit", "799Mi"),
            "/dev/shm has 799Mi, but Ray, vLLM and the store need 800",
        ),
        (
            put(f"{DECODE}{RAY}/volumeMounts/2/mountPath", "/var/lib/tandem/kv-store"),
            "decode: store.path must be below its mount",
        ),
    ],
)
def test_a_volume_that_does_not_hold_the_store(operation: dict[str, Any], message: str) -> None:
    found = mistaken(render(ROOT / "overlays" / "cpu-store"), "RayService", "tandem", operation)
    assert any(message in line for line in found), found
