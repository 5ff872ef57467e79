"""Kubernetes manifests: checked, their alerts tested, and an overlay's configuration served."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from configs.settings.auth import API_KEYS_VARIABLE
from configs.settings.kv import PEER_SECRET_VARIABLE
from testing.service_process import ServiceProcess
from tests.campaigns.runner import Report
from tests.campaigns.service.world import BODY
from tests.k8s.check import DIRECTORIES, ROOT, only, problems
from tests.k8s.kustomize import by_kubectl, render
from tests.k8s.service import amount, environment

OBJECT_STORE_BYTES = 100 * 2**20


def manifests(report: Report, *, overlays: str = "") -> None:
    """The checks of tests/k8s, on kubectl's rendering where there is a kubectl.

    ``overlays``: directories, instead of those of k8s/
    """
    for directory in map(Path, overlays.split()) if overlays else DIRECTORIES:
        rendered = by_kubectl(directory)
        found = problems(rendered or render(directory))
        report.row(directory=str(directory), by="kubectl" if rendered else "tests/k8s", problems=len(found))
        for one in found:
            report.problem(f"{directory}: {one}")


def alerts(report: Report) -> None:
    """Run promtool (Debian's package `prometheus`) over the alerts and their tests."""
    (rule,) = only(render(ROOT / "overlays" / "gpu"), "PrometheusRule")
    rules, tests = report.folder / "rules.yaml", report.folder / "alerts.yaml"
    rules.write_text(yaml.safe_dump(rule["spec"]))
    tests.write_text((Path(__file__).parents[1] / "k8s" / "alerts.yaml").read_text())
    for words in (("check", "rules", str(rules)), ("test", "rules", str(tests))):
        ran = subprocess.run(["promtool", *words], capture_output=True, text=True, check=False)
        report.row(command=" ".join(words[:2]), output=(ran.stdout + ran.stderr)[-800:])
        report.equal(f"promtool {words[0]}", ran.returncode, 0)


def overlay_serves(report: Report, *, overlay: str = "k8s/overlays/cpu") -> None:
    """Serve the configuration of an overlay on local Ray nodes, one for each pod, with its labels.

    The file is unchanged except for the HTTP port, which may be in use on this machine, and the
    routing policy: a short prompt must use both engines.
    """
    (service,) = only(render(Path(overlay).resolve()), "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    for application in config["applications"]:
        application["args"].setdefault("router", {})["routing"] = {"policy": "always_remote"}
    file = report.folder / "serve.yaml"
    file.write_text(yaml.safe_dump(config))
    key = secrets.token_hex(16)
    # In pods, the secret tandem-auth.
    os.environ |= {API_KEYS_VARIABLE: key, PEER_SECRET_VARIABLE: secrets.token_hex(16)}
    # Join no other cluster, and let no other process's `auto` find this one.
    os.environ |= {"RAY_TMPDIR": str(report.folder), "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ.pop("RAY_ADDRESS", None)
    with _nodes(report, service["spec"]["rayClusterConfig"]) as address:
        running = ServiceProcess(file, report.folder, arguments=("--address", address))
        running.start()
        try:
            with httpx.Client(base_url=running.url, timeout=120) as http:
                report.equal("without a key", http.post("/v1/completions", json=BODY).status_code, 401)
                reply = http.post("/v1/completions", json=BODY, headers={"Authorization": f"Bearer {key}"})
            report.equal("an answer", (reply.status_code, reply.json()["choices"][0]["text"].strip()), (200, "093"))
            report.equal("its route", reply.headers["x-tandem-route"], "remote")
        finally:
            report.equal("processes left", running.stop(), [])


@contextmanager
def _nodes(report: Report, spec: dict[str, Any]) -> Iterator[str]:
    """Start a node for the head and for each worker pod; yield the cluster's address."""
    from ray.cluster_utils import Cluster

    head = spec["headGroupSpec"]
    sizes = {f"num_{kind}": int(head["rayStartParams"][f"num-{kind}"]) for kind in ("cpus", "gpus")}
    small: dict[str, Any] = {"object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(
        initialize_head=True, head_node_args={"labels": head["labels"], "include_dashboard": False, **sizes, **small}
    )
    try:
        for group in spec["workerGroupSpecs"]:
            limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
            plain = {name: one["value"] for name, one in environment(group).items() if "value" in one}
            for _ in range(group["replicas"]):
                at = f"127.0.0.{len(cluster.worker_nodes) + 2}"
                cpus = int(amount(limits["cpu"]))
                cluster.add_node(num_cpus=cpus, labels=group["labels"], node_ip_address=at, env_vars=plain, **small)
                report.row(pod=group["groupName"], address=at, cpus=cpus)
        yield cluster.address
    finally:
        cluster.shutdown()
