"""A rolling upgrade under load: nodes of one release give way to nodes of the next one.

Ray nodes with the labels of the Kubernetes overlays, one engine each, stand for pods. As with
`tandem upgrade`, a new node joins, the old one gets SIGTERM, and Serve moves its replica. The next
release is a copy of this checkout with another version of the transfer protocol, so that engines of
the two refuse each other, and with a newer one of the RPC protocol, which routers negotiate.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from actors.rpc.protocol import NEWEST_VERSION
from connectors.protocol.agent_metadata import PROTOCOL_VERSION
from testing.programs import ROOT, Program
from tests.campaigns.runner import Report
from tests.campaigns.service.cluster import Cluster
from tests.campaigns.service.world import Clients

ROLES = {"router": 1, "prefill": 2, "decode": 1}
TURNS = {"turns": ("prefill", "decode", "prefill"), "groups": ("prefill", "prefill", "decode")}
"""Orders of replacement: that of `tandem upgrade`, and one role after the other."""

VERSIONS = {
    "connectors/protocol/agent_metadata.py": ("PROTOCOL_VERSION", PROTOCOL_VERSION),
    "actors/rpc/protocol.py": ("NEWEST_VERSION", NEWEST_VERSION),
}
MOST_RECOMPUTED = 0.02
LEFT_S = 300.0


def next_release(folder: Path, tree: Path) -> Path:
    for package in ("actors", "app", "configs", "connectors"):
        shutil.copytree(tree / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (constant, version) in VERSIONS.items():
        text, line = (folder / name).read_text(), f"\n{constant} = {version}\n"
        assert line in text, f"{name} does not contain {line!r}"
        (folder / name).write_text(text.replace(line, f"\n{constant} = {version + 1}\n"))
    return folder


def upgrade(report: Report, *, order: str = "turns", clients: int = 3, settle_s: float = 5.0, older: str = "") -> None:
    """Replace all engines under load, in an order of TURNS; ``older`` is another checkout."""
    later = next_release(report.folder / "later", Path(older or ROOT))
    # Ray puts the driver's folder before PYTHONPATH in the path of its workers.
    os.chdir(report.folder)
    sections: dict[str, Any] = {
        role: {"label_selector": {"tandem/role": role}, "placement": "apart", "replicas": count}
        for role, count in ROLES.items()
    }
    for role in ("prefill", "decode"):
        sections[role]["drain_s"] = 90
    environment = {"PYTHONPATH": older or str(ROOT), "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "240"}
    cluster = Cluster(report.folder, environment=environment, **sections)
    try:
        cluster.nodes.start_head()
        old = {role: [_start(cluster, role) for _ in range(count)] for role, count in ROLES.items()}
        cluster.deploy()
        asyncio.run(_upgrade(report, cluster, old, later, TURNS[order], clients, settle_s))
    finally:
        cluster.close()
        os.chdir(ROOT)


def _start(cluster: Cluster, role: str, **environment: str) -> Program:
    return cluster.nodes.start_worker(1, f"--labels=tandem/role={role}", **environment)


async def _upgrade(
    report: Report,
    cluster: Cluster,
    old: dict[str, list[Program]],
    later: Path,
    turns: tuple[str, ...],
    clients: int,
    settle_s: float,
) -> None:
    load = Clients(cluster.url, at_once=clients, pause_s=0.2, streams=False, facts=(60,), explain=True)
    await load.learn()
    load.next_phase(report, "before")
    load.start()
    try:
        await asyncio.sleep(settle_s)
        for role in turns:
            load.next_phase(report, f"{role} replaced")
            await asyncio.to_thread(_start, cluster, role, PYTHONPATH=str(later))
            await asyncio.to_thread(_leave, old[role].pop(0))
            await asyncio.to_thread(cluster.settle)
            await asyncio.sleep(settle_s)
    finally:
        await load.stop()
    load.next_phase(report)
    load.judge(report)
    routes = sum((each.routes for each in load.loads), Counter[str]())
    share = 1 - routes["remote"] / max(routes.total(), 1)
    report.row(requests=routes.total(), recomputed_share=round(share, 4), **routes)
    report.row(timeline=load.timeline)
    report.check(share <= MOST_RECOMPUTED, f"decode computed {share:.1%} of the prompts")


def _leave(node: Program) -> None:
    """Send SIGTERM to the node, and wait until its replica has moved and it has ended."""
    node.process.terminate()
    node.process.wait(LEFT_S)
