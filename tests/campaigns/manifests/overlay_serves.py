"""Check that the application file inside an overlay serves.

    make overlay-serves OVERLAY=k8s/overlays/cpu

Takes serveConfigV2 from the rendered RayService and starts the processes that KubeRay would: a Ray
head without resources, and a Ray node for each worker group with its labels, CPUs and plain
variables, each at its own address, like pods. The file is unchanged except for the HTTP port, which
may be in use on this machine, and the routing policy: a short prompt must use both engines. Then it
sends requests, and stops everything.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from configs.settings.auth import API_KEYS_VARIABLE
from configs.settings.kv import PEER_SECRET_VARIABLE
from testing.ports import free_port
from testing.service_process import ROOT
from tests.k8s.kuberay import environment
from tests.k8s.kustomize import render
from tests.k8s.quantity import amount

OBJECT_STORE_BYTES = 100 * 2**20
START_TIMEOUT_S = 480.0
STOP_TIMEOUT_S = 60.0
QUESTION = {"model": "tandem-demo", "prompt": "mira=427\nkelo=093\ntiba=618\nkelo?", "max_tokens": 8, "temperature": 0}
ANSWER = "093"


def main(argv: list[str] | None = None) -> int:
    """Return 0 if the service answered right and left nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overlay", type=Path, nargs="?", default=ROOT / "k8s" / "overlays" / "cpu")
    overlay = parser.parse_args(argv).overlay
    (service,) = (one for one in render(overlay.resolve()) if one["kind"] == "RayService")
    key = secrets.token_hex(16)
    # In pods, the secret tandem-auth.
    os.environ |= {API_KEYS_VARIABLE: key, PEER_SECRET_VARIABLE: secrets.token_hex(16)}
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        # Join no other cluster, and let no other process's `auto` find this one.
        os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        os.environ.pop("RAY_ADDRESS", None)
        file = Path(folder) / "serve.yaml"
        file.write_text(through_both_engines(service["spec"]["serveConfigV2"]))
        with nodes(service["spec"]["rayClusterConfig"]) as address, serving(file, address) as url:
            ask(url, key)
    left = psutil.Process().children(recursive=True)
    _, left = psutil.wait_procs(left, timeout=STOP_TIMEOUT_S)
    if left:
        print(f"left behind: {[one.name() for one in left]}", file=sys.stderr)
        for one in left:
            one.kill()
    return 1 if left else 0


def through_both_engines(config: str) -> str:
    """Return the Serve configuration with a routing policy that sends each prompt to prefill."""
    parsed = yaml.safe_load(config)
    for application in parsed["applications"]:
        application["args"].setdefault("router", {})["routing"] = {"policy": "always_remote"}
    return str(yaml.safe_dump(parsed))


@contextmanager
def nodes(cluster_spec: dict[str, Any]) -> Iterator[str]:
    """Start a node for the head and for each pod of each worker group; return the cluster's
    address.
    """
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    head = cluster_spec["headGroupSpec"]
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": int(head["rayStartParams"]["num-cpus"]),
            "num_gpus": int(head["rayStartParams"]["num-gpus"]),
            "labels": head["labels"],
            **small,
        },
    )
    try:
        number = 1
        for group in cluster_spec["workerGroupSpecs"]:
            limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
            plain = {name: one["value"] for name, one in environment(group).items() if "value" in one}
            for _ in range(group["replicas"]):
                number += 1
                cluster.add_node(
                    num_cpus=int(amount(limits["cpu"])),
                    labels=group["labels"],
                    node_ip_address=f"127.0.0.{number}",
                    env_vars=plain,
                    object_store_memory=OBJECT_STORE_BYTES,
                )
                print(f"tandem: a Ray node for a pod of {group['groupName']}: 127.0.0.{number}", flush=True)
        yield cluster.address
    finally:
        cluster.shutdown()


@contextmanager
def serving(file: Path, address: str) -> Iterator[str]:
    """Run `app.run` on the cluster, which is `serve run` with the file checked first; return the
    service's URL.
    """
    port = free_port()
    log = file.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "app.run", "--config", str(file), "--address", address, "--port", str(port)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while "tandem: ready" not in (text := log.read_text(errors="replace")):
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise RuntimeError(f"it does not serve:\n{text[-6000:]}")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask(url: str, key: str) -> None:
    """Send one request without the key and one with it.

    Raises AssertionError with an unexpected answer.
    """
    with httpx.Client(base_url=url, timeout=120) as http:
        refused = http.post("/v1/completions", json=QUESTION)
        assert refused.status_code == 401, refused.text
        reply = http.post("/v1/completions", json=QUESTION, headers={"Authorization": f"Bearer {key}"})
        assert reply.status_code == 200, reply.text
        text = reply.json()["choices"][0]["text"]
        route = reply.headers["x-tandem-route"], reply.headers.get("x-tandem-local-reason")
        print(f"tandem: answered {text!r}, route {route[0]}; /health says {http.get('/health').text}", flush=True)
        assert text.strip() == ANSWER, text
        assert route[0] == "remote", route


if __name__ == "__main__":
    sys.exit(main())
