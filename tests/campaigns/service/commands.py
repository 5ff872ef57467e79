"""Ray's own commands on a service, as in docs/operations.md; each in a shell of its own."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import httpx
import yaml

from tests.campaigns.runner import Report
from tests.campaigns.service.cluster import Cluster
from tests.campaigns.service.world import BODY, status, until


def commands(report: Report) -> None:
    """`serve run`, `status`, `config`, `deploy`, `shutdown`; `serve build` needs no cluster."""
    cluster = Cluster(report.folder)
    url, folder = cluster.url, report.folder
    config = folder / "serve.yaml"
    config.write_text(yaml.safe_dump(cluster.config))

    def shell(*words: str) -> subprocess.CompletedProcess[str]:
        ran = cluster.nodes.run(*words)
        report.row(command=" ".join(words)[:60], status=ran.returncode)
        return ran

    def deploy(deployment: str, **options: Any) -> None:
        cluster.entry(deployment).update(options)
        changed = folder / "changed.yaml"
        changed.write_text(yaml.safe_dump(cluster.config))
        ran = shell("serve", "deploy", str(changed))
        report.check(ran.returncode == 0, ran.stderr[-500:])

    def answer() -> httpx.Response:
        return httpx.post(f"{url}/v1/completions", json=BODY, timeout=60)

    def ready() -> bool:
        """A router that is ready before both roles serve would get requests."""
        is_ready = httpx.get(f"{url}/tandem/service").status_code == 200
        health = httpx.get(f"{url}/health")
        report.check(health.status_code == 200 or not is_ready, "the router is ready before its engines")
        return is_ready and health.json()["status"] == "ok"

    try:
        cluster.nodes.start_head()
        cluster.nodes.start_worker(4)
        with (folder / "run.log").open("wb") as log:
            command = cluster.nodes.command("serve", "run", str(config))
            running = subprocess.Popen(command, env=cluster.nodes.shell, stdout=log, stderr=log)
        try:
            until(ready, "`serve run` serves")
            report.equal("an answer", answer().json()["choices"][0]["text"].strip(), "093")
            shown = yaml.safe_load(shell("serve", "status").stdout)["applications"]["tandem"]
            report.equal("deployments", set(shown["deployments"]), {"Router", "Prefill", "Decode"})
            report.equal("`serve config`", yaml.safe_load(shell("serve", "config").stdout)["name"], "tandem")
            engines = {one["engine_ids"][0] for one in status(url)["engines"]}
            first = status(url)["routers"][0]["replica"]
            deploy("Router", user_config={"max_body_bytes": 10})
            until(lambda: answer().status_code == 413, "a changed limit", 60)
            deploy("Router", user_config={}, num_replicas=2)
            until(lambda: len(status(url)["routers"]) == 2, "two routers", 60)
            report.equal("engines after changes", {one["engine_ids"][0] for one in status(url)["engines"]}, engines)
            report.check(first in [one["replica"] for one in status(url)["routers"]], "a router was restarted")
            lines = [json.loads(line) for line in next(folder.rglob(f"access-{first}.log")).read_text().splitlines()]
            report.check({200, 413} <= {line["status"] for line in lines}, f"the access log has {lines}")
            report.equal("`serve shutdown`", shell("serve", "shutdown", "-y").returncode, 0)
            until(lambda: not yaml.safe_load(shell("serve", "status").stdout)["applications"], "it is shut down", 60)
        finally:
            running.terminate()
            running.wait(60)
    finally:
        cluster.close()
    built = folder / "built.yaml"
    ran = shell("serve", "build", "app.main:app", "-o", str(built))
    report.check(ran.returncode == 0, ran.stderr[-500:])
    (application,) = yaml.safe_load(built.read_text())["applications"]
    report.equal("`serve build`", application["import_path"], "app.main:app")
