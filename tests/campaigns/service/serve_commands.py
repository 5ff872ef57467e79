"""``make serve-commands``: Ray's own commands on a service.

`ray start`, then `serve run`, `status`, `config`, `deploy`, `build` and `shutdown`, as in
docs/operations.md: each in its own shell, on one Ray instance with one start of the engines.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from testing.ports import free_port
from testing.service_process import ROOT, write_config

pytestmark = pytest.mark.engine

START_S = 240.0
COMMAND_S = 60.0
BIN = Path(ROOT, ".venv", "bin")
FACTS = {"model": "tandem-demo", "prompt": "mira=427\nkelo=093\nkelo?", "max_tokens": 3, "temperature": 0}


@dataclass
class Shell:
    """Runner of a user's commands against the Ray instance of this module."""

    folder: Path
    config: Path
    url: str
    environment: dict[str, str]

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )

    def background(self, log: str, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("wb") as file:
            return subprocess.Popen(
                [str(BIN / command[0]), *command[1:]],
                cwd=self.folder,
                env=self.environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def serve_status(self) -> dict[str, Any]:
        told: dict[str, Any] = yaml.safe_load(self.run("serve", "status").stdout)
        return told

    def deploy(self, *deployments: dict[str, Any]) -> None:
        """Run `serve deploy` of the same `args` with these overrides."""
        config = yaml.safe_load(self.config.read_text())
        config["applications"][0]["deployments"] = list(deployments)
        changed = self.folder / "changed.yaml"
        changed.write_text(yaml.safe_dump(config))
        told = self.run("serve", "deploy", str(changed))
        assert told.returncode == 0, told.stderr

    def service(self) -> dict[str, Any]:
        """Return the JSON behind the status page."""
        told: dict[str, Any] = httpx.get(f"{self.url}/tandem/status").raise_for_status().json()
        return told

    def starts_in_order(self) -> bool:
        """Return whether both roles serve: a router that is ready earlier would get requests."""
        is_ready = httpx.get(f"{self.url}/tandem/service").status_code == 200
        health = httpx.get(f"{self.url}/health")
        assert health.status_code == 200 or not is_ready
        return is_ready and bool(health.json()["status"] == "ok")

    def is_unreachable(self) -> bool:
        try:
            httpx.get(f"{self.url}/health")
        except httpx.ConnectError:
            return True
        return False

    def engines(self) -> set[str]:
        """Each start of an engine has an id of its own."""
        return {engine["engine_ids"][0] for engine in self.service()["engines"]}


def wait_until(done: Callable[[], object], log: Path | None = None, within_s: float = COMMAND_S) -> None:
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            if done():
                return
        except (httpx.HTTPError, OSError):
            pass
        told = log.read_text(errors="replace")[-4000:] if log else ""
        assert time.monotonic() < give_up_at, f"not within {within_s:g} s\n{told}"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    """Run a shell beside `ray start --head`; its home, and so its token, is a folder of this
    module.
    """
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # Ray's sockets need a short path
    dashboard, port = free_port(), free_port()
    environment = os.environ | {
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
    }
    shell = Shell(
        folder, write_config("local.yaml", folder, router={"http_port": port}), f"http://127.0.0.1:{port}", environment
    )
    assert shell.run("ray", "get-auth-token", "--generate").returncode == 0
    gcs = free_port()
    options = (f"--port={gcs}", f"--dashboard-port={dashboard}", "--num-cpus=2", "--disable-usage-stats")
    ray = shell.background("ray.log", "ray", "start", "--head", "--block", *options)
    shell.environment["RAY_ADDRESS"] = f"127.0.0.1:{gcs}"
    try:
        wait_until(lambda: "--block" in (folder / "ray.log").read_text(), folder / "ray.log")
        yield shell
    finally:
        family = [psutil.Process(ray.pid), *psutil.Process(ray.pid).children(recursive=True)]
        ray.terminate()
        _, left = psutil.wait_procs(family, timeout=5)
        for process in left:
            process.kill()
        ray.wait()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_service_under_rays_own_commands(shell: Shell) -> None:
    """A service is started, checked, changed without a restart, and shut down."""
    log = shell.folder / "run.log"
    running = shell.background("run.log", "serve", "run", str(shell.config))
    try:
        wait_until(shell.starts_in_order, log, START_S)
        assert httpx.post(f"{shell.url}/v1/completions", json=FACTS).json()["choices"][0]["text"] == "093"

        # A second shell needs Ray's token mode, as docs/operations.md says.
        refused = shell.run("serve", "status", RAY_AUTH_MODE="")
        assert "uthentication" in refused.stdout + refused.stderr
        wait_until(lambda: shell.serve_status()["applications"]["tandem"]["status"] == "RUNNING")
        assert shell.serve_status()["applications"]["tandem"]["deployments"].keys() == {"Router", "Prefill", "Decode"}
        assert yaml.safe_load(shell.run("serve", "config").stdout)["name"] == "tandem"

        engines, began = shell.engines(), [one["replica"] for one in shell.service()["routers"]]
        assert len(engines) == 2
        shell.deploy({"name": "Router", "user_config": {"max_body_bytes": 10}})
        wait_until(lambda: httpx.post(f"{shell.url}/v1/completions", json=FACTS).status_code == 413)
        shell.deploy({"name": "Router", "user_config": {"max_body_byte": 10}})
        wait_until(lambda: "did you mean max_body_bytes?" in str(shell.service()["routers"][0]["rejected_config"]))
        assert httpx.post(f"{shell.url}/v1/completions", json=FACTS).status_code == 413, "the settings stay"
        shell.deploy({"name": "Router", "num_replicas": 2})
        wait_until(lambda: len(shell.service()["routers"]) == 2)
        wait_until(lambda: httpx.post(f"{shell.url}/v1/completions", json=FACTS).status_code == 200)
        assert shell.engines() == engines, "no engine was restarted"
        assert began[0] in [one["replica"] for one in shell.service()["routers"]]

        written = next(shell.folder.rglob(f"access-{began[0]}.log"))
        lines = [json.loads(line) for line in written.read_text().splitlines()]
        assert {"remote", 413} <= {line.get("route") for line in lines} | {line["status"] for line in lines}

        told = shell.run("serve", "shutdown", "-y")
        assert told.returncode == 0, told.stderr
        wait_until(lambda: not shell.serve_status()["applications"])
        wait_until(shell.is_unreachable)
    finally:
        running.terminate()
        running.wait(COMMAND_S)


def test_serve_build_writes_a_config_file(tmp_path: Path) -> None:
    """`app.main:app` is the service with default settings; no cluster is needed."""
    path = tmp_path / "built.yaml"
    shell = Shell(tmp_path, path, "", os.environ | {"PYTHONPATH": str(ROOT)})
    told = shell.run("serve", "build", "app.main:app", "-o", str(path))
    assert told.returncode == 0, told.stderr
    (application,) = yaml.safe_load(path.read_text())["applications"]
    assert application["import_path"] == "app.main:app"
    assert {one["name"] for one in application["deployments"]} == {"Router", "Prefill", "Decode"}
