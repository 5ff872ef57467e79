"""Prefill and decode on two hosts, the link between them cut and restored. Needs root."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx

from testing.service_process import write_config
from tests.campaigns.hosts.two_hosts import BACK, TwoHosts
from tests.campaigns.hosts.two_hosts import two_hosts as started
from tests.campaigns.runner import Report
from tests.campaigns.service.world import Clients, Load, leaks, total, until

RATE = "800mbit"
CUT_S = 5.0
REQUEST_S = 60.0
BOUND_S = REQUEST_S + 10
LOST_S = 180.0

TRANSFER = {"progress_s": 15.0, "alive_s": 2.0, "cancel_s": 2.0, "node_lost_s": 60.0}
ROUTER = {"request_timeout_s": REQUEST_S, "prefill_timeout_s": 25.0}
RAY = {
    # GCS: a node is dead after this number of checks without an answer. It must survive CUT_S.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "4",
    # A node: a connection without traffic for this time is broken, and without GCS for this time
    # the node ends itself. Until then its engines may write, so node_lost_s must be longer than the
    # two, less the time of GCS.
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "8",
}


class World:
    """The service, its clients, and the phases of the campaign."""

    def __init__(self, report: Report, service: TwoHosts, damage: float) -> None:
        self.report = report
        self.service = service
        self.url = service.url
        # A long prompt's asked fact is far outside the sliding window.
        self.clients = Clients(self.url, damage, at_once=6, pause_s=0.0, facts=(120,), may_be_refused=True)

    async def wait(self, done: Callable[[], object], what: str, within_s: float = BOUND_S) -> None:
        await asyncio.to_thread(until, done, what, within_s)

    @asynccontextmanager
    async def load(self, phase: str) -> AsyncIterator[Load]:
        """Run clients meanwhile, from the moment at which prefill serves them."""
        load = self.clients.next_phase(self.report, phase)
        self.clients.start()
        try:
            await self.wait(lambda: load.routes["remote"] >= self.clients.at_once, "clients are served")
            yield load
        finally:
            await self.clients.stop()
        self.report.check(load.slowest_s < BOUND_S, f"{phase}: a request took {load.slowest_s:.1f} s")

    async def routes(self, phase: str, wanted: str) -> None:
        """Check the route of a few requests, and that all blocks return to their pools."""
        load = self.clients.next_phase(self.report, phase)
        self.clients.start()
        await self.clients.answered(6)
        await self.clients.stop()
        self.report.equal(f"{phase}: routes", set(load.routes), {wanted})

    async def idle(self) -> None:
        self.report.equal("not at baseline", await asyncio.to_thread(leaks, self.url), {})

    def is_remote(self) -> bool:
        body = {"model": "tandem-demo", "prompt": f"mira=427\nkelo=093\n{time.monotonic()}?", "max_tokens": 2}
        reply = httpx.post(f"{self.url}/v1/completions", json=body, timeout=BOUND_S)
        return reply.headers.get("x-tandem-route") == "remote"

    def quarantined(self) -> float:
        return total(self.url, "vllm:tandem_kv_quarantined")

    def engine_runs(self) -> bool:
        """Return whether prefill's host has a process of an engine or its actor."""
        return re.search("VLLM|EngineCore|ray::ServeReplica", " ".join(self.service.back.running())) is not None

    def crossed_bytes(self) -> int:
        """Return the bytes that prefill's host has sent into its port so far."""
        shown = self.service.switch.output("ip", "-json", "-statistics", "link", "show", BACK)
        return int(json.loads(shown)[0]["stats64"]["rx"]["bytes"])

    # ---- phases ---------------------------------------------------------------------------------

    async def kv_crosses_the_link(self) -> None:
        """Prompt tokens come from prefill, and their bytes through the switch only."""
        before, crossed = total(self.url, "vllm:tandem_kv_sent_bytes_total"), self.crossed_bytes()
        await self.routes("at first", "remote")
        await self.idle()
        sent = total(self.url, "vllm:tandem_kv_sent_bytes_total") - before
        crossed = self.crossed_bytes() - crossed
        self.report.check(10**6 < sent < crossed, f"{sent:g} bytes of KV sent, {crossed} crossed the link")
        recomputed = total(self.url, "vllm:tandem_kv_requests_total", outcome="recomputed")
        self.report.equal("requests recomputed", recomputed, 0)

    async def cut_and_mended(self) -> None:
        """Every request ends in time, nothing leaks, and prefill is used again."""
        async with self.load("cut and mended"):
            self.service.switch.cut(BACK)
            await asyncio.sleep(CUT_S)
            self.service.switch.mend(BACK)
            await asyncio.sleep(CUT_S)
        await self.idle()
        await self.wait(self.is_remote, "prefill is used again", 60)
        await self.routes("after the cut", "remote")
        self.report.equal("blocks in quarantine", self.quarantined(), 0)

    async def cut_for_good(self) -> None:
        """Decode serves alone, and keeps blocks in quarantine until prefill's engine has ended."""
        async with self.load("cut for good"):
            self.service.switch.cut(BACK)
            began = time.monotonic()
            await self.wait(self.quarantined, "blocks are in quarantine")
        await self.routes("alone", "local")
        await self.wait(lambda: not self.quarantined(), "quarantine is over", LOST_S)
        self.report.row(quarantine_s=round(time.monotonic() - began))
        self.report.check(not self.engine_runs(), "blocks were freed while prefill's engine ran")
        await self.idle()

    async def the_host_comes_back(self) -> None:
        """A new Ray node there gets a new prefill engine, with a new handshake."""
        self.service.switch.mend(BACK)
        await asyncio.to_thread(self.service.start_back)
        await self.wait(self.is_remote, "a new prefill engine is used", LOST_S)
        await self.routes("the host is back", "remote")
        await self.idle()

    async def play(self) -> None:
        await self.clients.learn(20)
        await self.kv_crosses_the_link()
        await self.cut_and_mended()
        await self.cut_for_good()
        await self.the_host_comes_back()
        self.clients.next_phase(self.report)
        self.clients.judge(self.report)


def two_hosts(report: Report, *, damage: float = 0.0) -> None:
    config = write_config("two-hosts.yaml", report.folder, transfer=TRANSFER, router=ROUTER)
    with started(config, RATE, **RAY) as service:
        asyncio.run(World(report, service, damage).play())
