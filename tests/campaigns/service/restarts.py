"""Parts of a busy service are replaced or killed: no wrong answer, no leak, nothing left."""

from __future__ import annotations

import asyncio
import re
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from testing.ports import free_port
from testing.sse import said
from tests.campaigns.runner import Report
from tests.campaigns.service.cluster import Cluster, restarted
from tests.campaigns.service.world import (
    BODY,
    REQUEST_S,
    Clients,
    EngineProcess,
    engine_processes,
    exposition,
    leaks,
    service,
    status,
    until,
)

SETTLED_S = 5.0

# ---- rolling restart ----------------------------------------------------------------------------


def rolling_restart(report: Report, *, count: int = 2, damage: float = 0.0) -> None:
    """Deploy changed `args` under load, ``count`` times; then scale the engines to 1 and to 2."""
    two = {"replicas": 2, "num_cpus": 0.2}
    cluster = Cluster(report.folder, prefill=two, decode=two, router={"replicas": 2, "num_cpus": 0.05})
    try:
        cluster.nodes.start_head()
        cluster.nodes.start_worker(4)
        cluster.deploy()
        asyncio.run(_restart(report, cluster, count, damage))
    finally:
        cluster.close()


async def _restart(report: Report, cluster: Cluster, count: int, damage: float) -> None:
    clients = Clients(cluster.url, damage)
    await clients.learn()
    clients.next_phase(report, "before")
    clients.start()
    try:
        await asyncio.sleep(SETTLED_S)
        for turn in range(count):
            clients.next_phase(report, f"rolling restart {turn + 1}")
            before = cluster.replicas()
            cluster.application["args"]["router"]["retry_after_s"] = 2 + turn
            await asyncio.to_thread(cluster.deploy)
            report.equal(f"restart {turn + 1}: replaced deployments", restarted(before, cluster.replicas()), "all")
            await asyncio.sleep(SETTLED_S)
        for replicas in (1, 2):
            clients.next_phase(report, f"{replicas} of each role")
            for role in ("Prefill", "Decode"):
                cluster.entry(role)["num_replicas"] = replicas
            await asyncio.to_thread(cluster.deploy)
            found = {name: len(some) for name, some in cluster.replicas().items()}
            report.equal("replicas", found, {"Router": 2, "Prefill": replicas, "Decode": replicas})
            await asyncio.sleep(SETTLED_S)
    finally:
        await clients.stop()
    clients.next_phase(report)
    clients.judge(report)
    report.equal("not at baseline", await asyncio.to_thread(leaks, cluster.url), {})


# ---- the head's death ---------------------------------------------------------------------------

STREAMS, STREAM_TOKENS, KILL_AFTER = 4, 1500, 100
WITHOUT_HEAD_S = 30.0
"""Time with load and without the head, before Redis gives a new head its state."""

RECONNECT_S = 45
"""Time after which a node without the head ends, in seconds; KubeRay sets 600 s with Redis."""


@contextmanager
def redis(folder: Path) -> Iterator[dict[str, str]]:
    """Run a Redis server; yield the variables with which a head uses it."""
    port, password = free_port(), secrets.token_hex()
    (folder / "redis.conf").write_text(f'port {port}\nbind 127.0.0.1\nrequirepass {password}\nsave ""\n')
    with (folder / "redis.log").open("wb") as log:
        server = subprocess.Popen(["redis-server", "redis.conf"], cwd=folder, stdout=log, stderr=log)
    address = {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}", "REDIS_PASSWORD": password}
    try:
        yield address | {"RAY_external_storage_namespace": folder.name}
    finally:
        server.terminate()
        server.wait()


def head_killed(report: Report, *, only: str = "", damage: float = 0.0) -> None:
    """Kill all processes of the head (GCS, dashboard, Serve's controller) under load.

    redis     the head starts again with its state: the same engines, and Serve controls them again
    no redis  the worker node ends after RECONNECT_S; until then requests are served
    """
    for mode in ("redis", "no redis"):
        if only in ("", mode):
            folder = report.folder / mode[0]
            folder.mkdir()
            with report.case(mode), ExitStack() as servers:
                environment = servers.enter_context(redis(folder)) if mode == "redis" else {}
                reconnect = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(600 if environment else RECONNECT_S)}
                cluster = Cluster(folder, environment=environment | reconnect)
                servers.callback(cluster.close)
                asyncio.run(_kill_head(report, cluster, mode, damage))


async def _kill_head(report: Report, cluster: Cluster, mode: str, damage: float) -> None:
    password = cluster.nodes.environment.get("REDIS_PASSWORD")
    options = [f"--redis-password={password}"] if password else []
    head = cluster.nodes.start_head(*options)
    worker = cluster.nodes.start_worker(4)
    await asyncio.to_thread(cluster.deploy)
    engines = _engine_ids(cluster.url)
    clients = Clients(cluster.url, damage)
    await clients.learn()
    clients.next_phase(report, f"{mode}: before")
    async with httpx.AsyncClient(base_url=cluster.url, timeout=REQUEST_S) as http:
        reference = await _stream(http)
        clients.start()
        started = asyncio.Event()
        streams = [asyncio.create_task(_stream(http, started)) for _ in range(STREAMS)]
        await asyncio.wait([asyncio.create_task(started.wait()), *streams], return_when=asyncio.FIRST_COMPLETED)
        clients.next_phase(report, f"{mode}: without the head")
        await asyncio.to_thread(head.kill)
        killed_at = time.monotonic()
        texts = await asyncio.gather(*streams, return_exceptions=True)
    report.equal("streams over the head's end that differ", [text for text in texts if text != reference], [])
    await asyncio.sleep(max(0.0, killed_at + (WITHOUT_HEAD_S if password else RECONNECT_S / 2) - time.monotonic()))
    if not password:
        await clients.stop()
        clients.next_phase(report)
        clients.judge(report)
        _, left = await asyncio.to_thread(psutil.wait_procs, worker.processes(), 120)
        report.row(mode=mode, worker_ended_after_s=round(time.monotonic() - killed_at))
        report.equal("processes left on a node without the head", [str(one) for one in left], [])
        return
    clients.next_phase(report, f"{mode}: the head is back")
    await asyncio.to_thread(cluster.nodes.start_head, *options)
    await asyncio.to_thread(until, lambda: cluster.details().get("status") == "RUNNING", "Serve runs again")
    report.equal("engines after the head's return", _engine_ids(cluster.url), engines)
    cluster.entry("Router")["user_config"] = {"max_body_bytes": 50_000}
    await asyncio.to_thread(cluster.deploy)
    big = BODY | {"prompt": "x" * 60_000}
    await asyncio.to_thread(
        until,
        lambda: httpx.post(f"{cluster.url}/v1/completions", json=big, timeout=30).status_code == 413,
        "the router has a changed setting",
    )
    await clients.stop()
    clients.next_phase(report)
    clients.judge(report)
    # The only decode engine: its requests are refused until Serve has replaced it.
    engine_processes(worker.processes(), "Decode")[0].core.kill()

    def replaced() -> bool:
        now = _engine_ids(cluster.url)
        return now.keys() == engines.keys() and now["decode"] != engines["decode"]

    await asyncio.to_thread(until, replaced, "Serve has replaced a killed engine")
    report.equal("not at baseline", await asyncio.to_thread(leaks, cluster.url), {})


def _engine_ids(url: str) -> dict[str, str]:
    """Return the engine ids by role; each start of an engine has a new one."""
    return {engine["role"]: engine["engine_ids"][0] for engine in status(url)["engines"]}


async def _stream(http: httpx.AsyncClient, started: asyncio.Event | None = None) -> str:
    """Return the text of a long stream; set ``started`` after KILL_AFTER events."""
    raw = b""
    body = BODY | {"max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        async for chunk in reply.aiter_bytes():
            raw += chunk
            if started is not None and raw.count(b"data: ") >= KILL_AFTER:
                started.set()
    return str(said(raw)["text"])


# ---- deaths of data-parallel ranks --------------------------------------------------------------

FEWEST_SHARE = 0.6
"""Fewest requests of a rank, as a fraction of an equal share."""

SCALED = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 2,
    "look_back_period_s": 2.0,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 10.0,
}
"""Autoscaling of prefill: eight requests at once need a second replica, one at a time does not."""


def rank_deaths(
    report: Report, *, count: int = 100, kills: int = 20, prefill: int = 2, decode: int = 2, damage: float = 0.0
) -> None:
    """Kill the core of one rank under load: vLLM ends its replica, and Serve starts it again.

    Requests wait for it. Before that, each rank must serve a fair share of ``count`` requests. At
    the end, Serve adds and removes a prefill replica under load.
    """
    sizes = {"Prefill": prefill, "Decode": decode}
    sections: dict[str, Any] = {role.lower(): {"data_parallel_size": size} for role, size in sizes.items()}
    sections["router"] = {"replica_timeout_s": REQUEST_S, "first_token_timeout_s": REQUEST_S}
    with service(report, **sections) as running:
        asyncio.run(_kill_ranks(report, running, sizes, count, kills, damage))
    with service(report, prefill={"replicas": SCALED}, router=sections["router"]) as running:
        asyncio.run(_scale(report, running.url))


async def _kill_ranks(
    report: Report, running: Any, sizes: Mapping[str, int], count: int, kills: int, damage: float
) -> None:
    def ranks() -> dict[str, list[EngineProcess]]:
        """Return the ranks by role, once both roles have all of theirs and answer."""
        found = {role: engine_processes(running.processes(), role) for role in sizes}
        replicas = httpx.get(f"{running.url}/health", timeout=30).json()["replicas"]
        whole = all(len(found[role]) == size and replicas[role.lower()] == 1 for role, size in sizes.items())
        return found if whole else {}

    await asyncio.to_thread(until, ranks, "all ranks serve")
    clients = Clients(running.url, damage, at_once=8, pause_s=0.0, streams=False)
    await clients.learn()
    before = _served(running.url)
    clients.next_phase(report, "all ranks")
    clients.start()
    await clients.answered(count)
    await clients.stop()
    served = {key: number - before.get(key, 0) for key, number in _served(running.url).items()}
    report.row(served_by_rank={" ".join(key): number for key, number in served.items()})
    for role, size in sizes.items():
        own = [served.get((role.lower(), str(rank)), 0) for rank in range(size)]
        report.check(count < 50 or min(own) >= FEWEST_SHARE * sum(own) / size, f"{role}: unfair shares {own}")
    for number in range(kills):
        role = list(sizes)[number % len(sizes)]
        found = (await asyncio.to_thread(until, ranks, "the ranks are back"))[role]
        victim = sorted(found, key=lambda one: one.title)[number // len(sizes) % len(found)]
        rank = re.search(r"EngineCore\S*", victim.title)
        clients.next_phase(report, f"kill {number + 1}: {role} {rank[0] if rank else ''}")
        clients.start()
        await clients.answered(clients.at_once)
        victim.core.kill()
        await clients.answered(2 * clients.at_once)
        await clients.stop()
        _, left = await asyncio.to_thread(psutil.wait_procs, [one.core for one in found], 60)
        report.equal(f"kill {number + 1}: cores left of the replica", [str(one) for one in left], [])
    await asyncio.to_thread(until, ranks, "the ranks are back")
    clients.next_phase(report)
    clients.judge(report)
    report.equal("not at baseline", await asyncio.to_thread(leaks, running.url), {})


def _served(url: str) -> dict[tuple[str, str], float]:
    """Return the requests served so far, by role and data-parallel rank."""
    found: dict[tuple[str, str], float] = {}
    for one in exposition(url):
        if one.name == "vllm:request_success_total":
            key = one.labels["role"], one.labels["engine"]
            found[key] = found.get(key, 0.0) + one.value
    return found


async def _scale(report: Report, url: str) -> None:
    """Scale prefill up and down by load; no request may fail."""
    many = Clients(url, at_once=8, pause_s=0.0)
    await many.learn()
    for clients, replicas in ((8, 2), (1, 1)):
        many.at_once = clients
        many.next_phase(report, f"{clients} at once, until prefill has {replicas} replicas")
        many.start()

        def reached(wanted: int = replicas) -> bool:
            return httpx.get(f"{url}/health", timeout=30).json()["replicas"]["prefill"] == wanted

        with suppress(TimeoutError):
            await asyncio.to_thread(until, reached, "")
        report.check(reached(), f"prefill does not have {replicas} replicas within {REQUEST_S:g} s")
        await many.answered(24)
        await many.stop()
    many.next_phase(report)
    many.judge(report)
    report.equal("not at baseline", await asyncio.to_thread(leaks, url), {})
