"""The service on Ray nodes of this machine, deployed by Serve's REST API as `serve deploy` does."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import yaml

from testing.ports import free_port
from testing.ray_nodes import RayCluster
from testing.service_process import ROOT, write_config

APPLICATION = "tandem"
SETTLE_S = 600.0
POLL_S = 0.3

Config = dict[str, Any]
Replicas = Mapping[str, Mapping[str, str]]
"""Actor names of running replicas by deployment, then by replica id."""


class NotSettledError(Exception):
    """Serve did not complete a change in time, or it failed."""


class Cluster:
    """Ray nodes in ``folder``, and the deployed Serve config ``config``.

    ``sections``  changes of `args` of ``base``, a shipped configuration
    """

    def __init__(
        self, folder: Path, base: str = "local.yaml", environment: Mapping[str, str] | None = None, **sections: Any
    ) -> None:
        token = secrets.token_hex(32)
        # A node's worker processes import the application from the checkout.
        own = {"PYTHONPATH": str(ROOT), "RAY_AUTH_TOKEN": token, **(environment or {})}
        self.nodes = RayCluster(folder, own)
        port = free_port()
        router = {"http_port": port, **sections.pop("router", {})}
        self.config: Config = yaml.safe_load(write_config(base, folder, router=router, **sections).read_text())
        self.url = f"http://127.0.0.1:{port}"
        self._deployed: Config | None = None
        self._api = httpx.Client(
            base_url=f"http://127.0.0.1:{self.nodes.dashboard_port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
        )

    @property
    def application(self) -> dict[str, Any]:
        """The application's part of the config; change it, then `deploy`."""
        found: dict[str, Any] = self.config["applications"][0]
        return found

    def entry(self, deployment: str) -> dict[str, Any]:
        """Return the options of a deployment under `deployments`; add them if there are none."""
        entries: list[dict[str, Any]] = self.application.setdefault("deployments", [])
        for found in entries:
            if found["name"] == deployment:
                return found
        entries.append({"name": deployment})
        return entries[-1]

    def details(self) -> dict[str, Any]:
        """Return what `serve status` shows of the application, and more."""
        reply = self._api.get("/api/serve/applications/").raise_for_status()
        found: dict[str, Any] = reply.json()["applications"].get(APPLICATION, {})
        return found

    def replicas(self) -> Replicas:
        return {
            name: {one["replica_id"]: one["actor_name"] for one in each["replicas"] if one["state"] == "RUNNING"}
            for name, each in self.details().get("deployments", {}).items()
        }

    def deploy(self, wait: bool = True) -> None:
        """Deploy the config. Raises NotSettledError after a failure or SETTLE_S."""
        last = self.details().get("last_deployed_time_s", 0) if self._deployed else 0
        reply = self._api.put("/api/serve/applications/", json=self.config)
        if reply.status_code != httpx.codes.OK:
            raise NotSettledError(f"HTTP {reply.status_code}: {reply.text[:500]}")
        self._deployed = deepcopy(self.config)
        if wait:
            self.settle(last)

    def settle(self, last: float = 0.0) -> None:
        """Wait until Serve has completed a deployment later than ``last``."""
        give_up_at, complete = time.monotonic() + SETTLE_S, 0
        while complete < 2:  # twice: the first status may be that of the change before
            time.sleep(POLL_S)
            now = self.details()
            if now.get("status") == "DEPLOY_FAILED":
                raise NotSettledError(now["message"][-1500:])
            complete = complete + 1 if now.get("last_deployed_time_s", 0) > last and _is_complete(now) else 0
            if time.monotonic() > give_up_at:
                states = {name: [one["state"] for one in each["replicas"]] for name, each in now["deployments"].items()}
                raise NotSettledError(f"not complete after {SETTLE_S:g} s: {now.get('status')}, {states}")

    def close(self) -> None:
        self._api.close()
        self.nodes.stop()


def _is_complete(details: Mapping[str, Any]) -> bool:
    deployments = details.get("deployments", {}).values()
    return (
        details.get("status") == "RUNNING"
        and bool(deployments)
        and all(
            one["status"] == "HEALTHY"
            and [replica["state"] for replica in one["replicas"]] == ["RUNNING"] * one["target_num_replicas"]
            for one in deployments
        )
    )


def restarted(before: Replicas, after: Replicas) -> str:
    """Return the deployments whose replicas have ended: all, some by name, or none."""
    ended = {name: [one for one in before[name] if one not in after.get(name, {})] for name in before}
    if all(len(ended[name]) == len(before[name]) for name in before):
        return "all"
    parts = [
        name if len(gone) == len(before[name]) else f"{name} ({len(gone)} of {len(before[name])})"
        for name, gone in ended.items()
        if gone
    ]
    return ", ".join(sorted(parts)) or "none"
