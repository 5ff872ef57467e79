"""A running service on two Ray nodes of this machine, controlled by Serve's REST API."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from testing.ray_nodes import RayCluster
from tests.campaigns.service.setting_changes.inspection import ask, drains, replica_state, scaling_settings
from tests.campaigns.service.setting_changes.steps import APPLICATION, KEY, Config

SETTLE_S = 300.0
EFFECT_S = 60.0
REQUEST_S = 60.0
POLL_S = 0.3
CONTROLLER = "SERVE_CONTROLLER_ACTOR"
BODY = {"model": "tandem-demo", "prompt": "mira=427\nkelo=093\nkelo?" * 20, "max_tokens": 1}


class NotSettledError(Exception):
    """Serve did not complete a change in time, or it failed."""


@dataclass(frozen=True)
class Replica:
    """One running replica, as Serve's controller reports it."""

    id: str
    actor: str


Replicas = Mapping[str, Mapping[str, Replica]]
"""Running replicas by deployment, then by id."""


class Service:
    """The application on a Ray cluster. `config` is the deployed Serve config."""

    def __init__(self, cluster: RayCluster, token: str, certificates: tuple[Path, Path, Path]) -> None:
        self.config: Config = {}
        self._certificates = certificates
        self._api = httpx.Client(
            base_url=f"http://127.0.0.1:{cluster.dashboard_port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=REQUEST_S,
        )

    def close(self) -> None:
        self._api.close()

    def details(self) -> dict[str, Any]:
        """Return the application's part of Serve's REST answer, the source of `serve status`."""
        reply = self._api.get("/api/serve/applications/").raise_for_status()
        found: dict[str, Any] = reply.json()["applications"].get(APPLICATION, {})
        return found

    def deploy(self, config: Config) -> Replicas:
        """Deploy `config` as `serve deploy` does; return the replicas once Serve has completed it.

        Raises NotSettledError if Serve reports a failure, or after SETTLE_S.
        """
        last = self.details().get("last_deployed_time_s", 0) if self.config else 0
        reply = self._api.put("/api/serve/applications/", json=config)
        if reply.status_code != httpx.codes.OK:
            raise NotSettledError(f"HTTP {reply.status_code}: {reply.text[:500]}")
        self.config = config
        give_up_at = time.monotonic() + SETTLE_S
        complete = 0
        while complete < 2:  # twice: the first status may be that of the change before
            time.sleep(POLL_S)
            now = self.details()
            if now.get("status") == "DEPLOY_FAILED":
                raise NotSettledError(now["message"][-1500:])
            is_new = now.get("last_deployed_time_s", 0) > last or not last
            complete = complete + 1 if is_new and _is_complete(now) else 0
            if time.monotonic() > give_up_at:
                raise NotSettledError(f"not complete after {SETTLE_S:g} s: {_summary(now)}")
        return _replicas(now)

    def replicas(self) -> Replicas:
        return _replicas(self.details())

    def options(self, deployment: str) -> dict[str, Any]:
        """Return the options of a deployment that Serve has in effect."""
        found: dict[str, Any] = self.details()["deployments"][deployment]["deployment_config"]
        return found

    def states(self, replicas: Replicas, deployment: str) -> list[dict[str, Any]]:
        """Return the state of each replica of a deployment."""
        return [ask(one.actor, replica_state) for one in replicas.get(deployment, {}).values()]

    def scaling(self) -> dict[str, Any]:
        """Return the settings of the application's autoscaling policy."""
        return ask(CONTROLLER, scaling_settings, APPLICATION)

    def drains(self, deployment: str) -> dict[str, Any]:
        """Return the seconds that each running replica has to drain, by replica id."""
        return ask(CONTROLLER, drains, APPLICATION, deployment)

    @property
    def router(self) -> dict[str, Any]:
        """Settings of the router in `args`."""
        found: dict[str, Any] = self.config["applications"][0]["args"].get("router", {})
        return found

    def client(self, certificate: bool = True, key: bool = True) -> httpx.Client:
        """Return a client of the routers.

        ``certificate``  whether it has a client certificate
        ``key``          whether it sends an API key
        """
        secure = bool(self.router.get("ssl_certfile"))
        verify: ssl.SSLContext | bool = True
        if secure:
            chain, private, authority = self._certificates
            verify = ssl.create_default_context(cafile=authority)
            verify.check_hostname = False
            if certificate:
                verify.load_cert_chain(chain, private)
        host, port = self.router.get("http_host", "127.0.0.1"), self.router.get("http_port", 8100)
        return httpx.Client(
            base_url=f"{'https' if secure else 'http'}://{host}:{port}",
            headers={"Authorization": f"Bearer {KEY}"} if key else {},
            verify=verify,
            timeout=REQUEST_S,
        )

    def request(self, certificate: bool = True, key: bool = True) -> str:
        """Return the status of one request, or the error of its connection."""
        models = self.config["applications"][0]["args"].get("models") or [{}]
        body = BODY | {"model": models[0].get("served_model_name", BODY["model"])}
        try:
            with self.client(certificate, key) as http:
                return str(http.post("/v1/completions", json=body).status_code)
        except httpx.HTTPError as error:
            return repr(error)

    def status(self) -> dict[str, Any]:
        """Return the JSON of `/tandem/status`."""
        with self.client() as http:
            found: dict[str, Any] = http.get("/tandem/status").raise_for_status().json()
            return found


def restarted(before: Replicas, after: Replicas) -> str:
    """Return the deployments of `before` whose replicas have ended: all, some by name, or none."""
    ended = {name: [one for one in before[name] if one not in after.get(name, {})] for name in before}
    if all(len(ended[name]) == len(before[name]) for name in before):
        return "all"
    parts = [
        name if len(gone) == len(before[name]) else f"{name} ({len(gone)} of {len(before[name])})"
        for name, gone in ended.items()
        if gone
    ]
    return ", ".join(sorted(parts)) or "none"


def problem_within(seconds: float, find: Callable[[], str | None]) -> str | None:
    """Return None as soon as `find` does, or its last problem after `seconds`."""
    give_up_at = time.monotonic() + seconds
    while True:
        try:
            problem = find()
        except Exception as error:  # a replica may be ending; the last error is the problem
            problem = repr(error)[:500]
        if problem is None or time.monotonic() > give_up_at:
            return problem
        time.sleep(POLL_S)


def _replicas(details: Mapping[str, Any]) -> Replicas:
    return {
        name: {
            one["replica_id"]: Replica(one["replica_id"], one["actor_name"])
            for one in deployment["replicas"]
            if one["state"] == "RUNNING"
        }
        for name, deployment in details.get("deployments", {}).items()
    }


def _is_complete(details: Mapping[str, Any]) -> bool:
    deployments = details.get("deployments", {})
    return (
        details.get("status") == "RUNNING"
        and bool(deployments)
        and all(
            one["status"] == "HEALTHY"
            and all(replica["state"] == "RUNNING" for replica in one["replicas"])
            and len(one["replicas"]) == one["target_num_replicas"]
            for one in deployments.values()
        )
    )


def _summary(details: Mapping[str, Any]) -> str:
    deployments = details.get("deployments", {})
    states = {name: [one["state"] for one in each["replicas"]] for name, each in deployments.items()}
    return f"{details.get('status')}: {details.get('message', '')[-500:]} {states}"
