"""Kill the Ray head of a busy service, without and with Redis.

    python -m tests.campaigns.service.head_killed [--only redis]

A head node without CPUs and a worker node with one router and one engine of each role, on this
machine. While long streams and short requests run, all processes of the head get SIGKILL: the GCS,
the dashboard, and Serve's controller. The streams must continue unchanged, and new requests must be
served over both engines.

redis     the head starts again with the state that Redis has kept. The engines must still be the
          same, Serve must apply a changed configuration, and it must replace a killed engine.
no redis  the state is lost. The worker node ends when it has been without the head for
          RECONNECT_S; until then requests are served. No process may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from actors.upstream.ray_private import RECONNECT_VARIABLE
from testing.ports import free_port
from testing.ray_nodes import RayCluster, RayNode
from testing.service_process import ROOT, write_config
from testing.sse import said
from tests.campaigns.service.data_parallel import leaks
from tests.campaigns.service.rolling_restart import Clients, Load

MODES = ("no redis", "redis")
STREAMS = 4
STREAM_TOKENS = 1500
KILL_AFTER_TOKENS = 100
WITHOUT_HEAD_S = 30.0
"""Time with load and without the head, before Redis gives a new head its state."""

RECONNECT_S = 45
"""Time after which a node without the head ends, in seconds; KubeRay sets 600 s with Redis."""

READY_S = 240.0
END_S = 120.0
BODY = {"model": "tandem-demo", "prompt": "mira=427\nkelo=093\nkelo?", "temperature": 0, "ignore_eos": True}


@contextmanager
def redis(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Redis server; yield the variables with which a head uses it."""
    port, password = free_port(), secrets.token_hex()
    (folder / "redis.conf").write_text(f'port {port}\nbind 127.0.0.1\nrequirepass {password}\nsave ""\n')
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen(["redis-server", "redis.conf"], cwd=folder, stdout=log, stderr=log)
    try:
        yield {
            "RAY_REDIS_ADDRESS": f"127.0.0.1:{port}",
            "REDIS_PASSWORD": password,
            "RAY_external_storage_namespace": folder.name,
        }
    finally:
        server.terminate()
        server.wait()


class Campaign:
    """One kill of the head in one mode. `problems` are broken promises."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.keeps_state = bool(environment)
        reconnect_s = 600 if self.keeps_state else RECONNECT_S
        self.cluster = RayCluster(folder, environment | {"PYTHONPATH": str(ROOT), RECONNECT_VARIABLE: str(reconnect_s)})
        port = free_port()
        self.config = write_config("local.yaml", folder, router={"http_port": port})
        self.url = f"http://127.0.0.1:{port}"
        self.problems: list[str] = []
        self.load = Load("before the kill")
        self.loads = [self.load]

    def start_head(self) -> RayNode:
        password = self.cluster.environment.get("REDIS_PASSWORD")
        return self.cluster.start_head(*([f"--redis-password={password}"] if password else []))

    def deploy(self, *deployments: dict[str, Any]) -> None:
        """Run `serve deploy` with these overrides. Raises RuntimeError if the command fails."""
        config = yaml.safe_load(self.config.read_text())
        config["applications"][0]["deployments"] = list(deployments)
        path = self.folder / "deployed.yaml"
        path.write_text(yaml.safe_dump(config))
        outcome = self.cluster.run("serve", "deploy", str(path))
        if outcome.returncode != 0:
            raise RuntimeError(f"serve deploy failed: {outcome.stdout}{outcome.stderr}")

    def serves(self) -> bool:
        reply = httpx.get(f"{self.url}/health", timeout=10)
        return bool(reply.json()["status"] == "ok")

    def status(self) -> dict[str, Any]:
        """Return Serve's status of the application."""
        found = yaml.safe_load(self.cluster.run("serve", "status").stdout) or {}
        status: dict[str, Any] = found.get("applications", {}).get("tandem", {})
        return status

    def engine_ids(self) -> dict[str, str]:
        """Return the engine ids by role; each start of an engine has a new one."""
        engines = httpx.get(f"{self.url}/tandem/status", timeout=10).json()["engines"]
        return {engine["role"]: engine["engine_ids"][0] for engine in engines}

    def next_phase(self, clients: Clients, name: str) -> None:
        print(json.dumps(asdict(clients.load)), flush=True)
        clients.load = Load(name)
        self.loads.append(clients.load)

    async def run(self, head: RayNode, worker: RayNode) -> None:
        """Kill `head` under load, and check what follows."""
        await until(self.serves, READY_S, "the service answers")
        before = self.engine_ids()
        clients = Clients(self.url, self.load)
        await clients.learn()
        async with httpx.AsyncClient(base_url=self.url, timeout=READY_S) as http:
            reference = await stream(http)
            clients.start()
            started = asyncio.Event()
            streams = [asyncio.create_task(stream(http, started)) for _ in range(STREAMS)]
            first = asyncio.create_task(started.wait())
            # A stream that fails must not keep this waiting; `gather` below reports it.
            await asyncio.wait([first, *streams], return_when=asyncio.FIRST_COMPLETED)
            first.cancel()
            self.next_phase(clients, "without the head")
            print(f"killing {len(head.family())} processes of the head", flush=True)
            await asyncio.to_thread(head.kill)
            killed_at = time.monotonic()
            for number, text in enumerate(await asyncio.gather(*streams, return_exceptions=True)):
                if text != reference:
                    self.problems.append(f"stream {number} over the head's end: {text!r:.300}")
            streamed_s = time.monotonic() - killed_at
            print(f"{STREAMS} streams ended {streamed_s:.1f} s after the kill", flush=True)
            if self.keeps_state:
                await asyncio.sleep(max(WITHOUT_HEAD_S - streamed_s, 0))
                await self.bring_back(worker, clients, before)
                await clients.stop()
            else:
                await asyncio.sleep(max(RECONNECT_S / 2 - streamed_s, 0))
                await clients.stop()
                self.next_phase(clients, "")
                await self.check_end(worker, killed_at)

    async def bring_back(self, worker: RayNode, clients: Clients, before: dict[str, str]) -> None:
        """Start the head again; check that engines stay, and that Serve controls them again."""
        self.next_phase(clients, "the head is back")
        await asyncio.to_thread(self.start_head)
        await until(lambda: self.status().get("status") == "RUNNING", READY_S, "serve status is RUNNING")
        if (after := self.engine_ids()) != before:
            self.problems.append(f"engines were restarted: {before} before, {after} after")
        await asyncio.to_thread(self.deploy, {"name": "Router", "user_config": {"max_body_bytes": 50_000}})
        big = {**BODY, "prompt": "x" * 60_000}
        await until(
            lambda: httpx.post(f"{self.url}/v1/completions", json=big, timeout=30).status_code == 413,
            READY_S,
            "the router has the changed setting",
        )
        self.next_phase(clients, "a decode engine is killed")
        failed_before = len(self.loads[-2].failed)
        await asyncio.to_thread(decode_core(worker).kill)

        def replaced() -> bool:
            now = self.engine_ids()
            return now.keys() == before.keys() and now["decode"] != before["decode"]

        await until(replaced, READY_S, "Serve has replaced the killed engine")
        await clients.stop()
        self.next_phase(clients, "")
        # Without another decode engine, requests that the killed one served are refused, with
        # status 503 or, in a stream that has begun, with an event of code 503. Some of them began
        # in the phase before.
        refused = 0
        for load, first in ((self.loads[-3], failed_before), (self.loads[-2], 0)):
            kept = [one for one in load.failed[first:] if "HTTP 503" not in one and "'code': 503" not in one]
            refused += len(load.failed) - first - len(kept)
            load.failed[first:] = kept
        print(f"{refused} requests were refused while the only decode engine was replaced", flush=True)
        if left := await asyncio.to_thread(leaks, self.url):
            self.problems.append(f"not at baseline: {left}")

    async def check_end(self, worker: RayNode, killed_at: float) -> None:
        """Check that the worker node ends by itself, with all its processes."""
        family = worker.family()
        _, left = await asyncio.to_thread(psutil.wait_procs, family, END_S)
        print(
            f"{len(family)} processes of the worker node ended within {time.monotonic() - killed_at:.0f} s", flush=True
        )
        for process in left:
            with suppress(psutil.NoSuchProcess):
                self.problems.append(f"left on a node without the head: {' '.join(process.cmdline())[:80]}")
                process.kill()


def decode_core(worker: RayNode) -> psutil.Process:
    """Return the core process of the only decode engine."""
    for process in worker.family():
        if ":Decode" in " ".join(process.cmdline()):
            for child in process.children(recursive=True):
                if "EngineCore" in " ".join(child.cmdline()):
                    return child
    raise RuntimeError("no decode engine runs")


async def stream(http: httpx.AsyncClient, started: asyncio.Event | None = None) -> str:
    """Return the text of a long stream; set `started` after KILL_AFTER_TOKENS events."""
    raw, events = b"", 0
    body = {**BODY, "max_tokens": STREAM_TOKENS, "stream": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"HTTP {reply.status_code}: {(await reply.aread())[:300]!r}")
        async for chunk in reply.aiter_bytes():
            raw += chunk
            events += chunk.count(b"data: ")
            if started is not None and events >= KILL_AFTER_TOKENS:
                started.set()
    return str(said(raw)["text"])


async def until(done: Callable[[], object], within_s: float, what: str) -> None:
    """Wait until `done` returns a true value. Raises TimeoutError with `what` after `within_s`."""
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            if await asyncio.to_thread(done):
                return
        except (httpx.HTTPError, OSError, KeyError, ValueError, subprocess.TimeoutExpired):
            pass  # not yet
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await asyncio.sleep(1)


def play(mode: str, folder: Path) -> list[str]:
    """Run one mode. Return the broken promises."""
    folder.mkdir(parents=True)
    with ExitStack() as servers:
        campaign = Campaign(folder, servers.enter_context(redis(folder)) if mode == "redis" else {})
        servers.callback(campaign.cluster.stop)
        if campaign.cluster.run("ray", "get-auth-token", "--generate").returncode != 0:
            raise RuntimeError("ray get-auth-token failed")
        head = campaign.start_head()
        worker = campaign.cluster.start_worker(4)
        campaign.deploy()
        asyncio.run(campaign.run(head, worker))
    for load in campaign.loads:
        campaign.problems += [f"{load.phase}: {one}" for one in (*load.failed, *load.wrong)]
    requests = sum(load.requests for load in campaign.loads)
    print(f"{mode}: {requests} requests, {len(campaign.problems)} problems", flush=True)
    return [f"{mode}: {one}" for one in campaign.problems]


def main() -> int:
    """Return 0 if no promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODES)
    options = parser.parse_args()
    if options.only != "no redis" and not shutil.which("redis-server"):
        print("redis-server is not on the path; Debian: apt-get install redis-server", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the nodes must not outlive this process
    folder = Path(tempfile.mkdtemp(prefix="th", dir="/tmp"))  # Ray's sockets need a short path
    problems = []
    for mode in MODES if options.only is None else (options.only,):
        problems += play(mode, folder / mode.replace(" ", "-"))
    print("\n".join(problems) or "no promise was broken", flush=True)
    if not problems:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        print(f"logs are in {folder}", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
