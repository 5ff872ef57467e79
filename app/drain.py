"""Empties this Ray node before its pod ends: `python -m app.drain --deadline-s 240`, a pod's preStop hook.

Kubernetes knows nothing of replicas and Ray nothing of a pod's end. This tells Ray that the node goes away: Serve
starts replacements elsewhere, sends no new requests here, lets running ones end (`drain_s`) and stops the replicas. The
hook returns when they have gone or the deadline has come; only then does Kubernetes stop the pod.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

POLL_S = 1.0
REPLICA_TITLE = "ray::ServeReplica"
NODE_ID_FLAG = "--node_id="
MODULE = "app.drain"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    raylets = find_raylets(options.node_id)
    if len(raylets) != 1:
        print(f"drain: {len(raylets)} Ray nodes run here, not one; which is meant says --node-id", file=sys.stderr)
        return 1
    ((node_id, raylet),) = raylets.items()
    deadline = time.monotonic() + options.deadline_s
    announced = announce(node_id, options.deadline_s)
    if announced.returncode != 0:
        print(f"drain: Ray did not take it: {announced.stderr.strip() or announced.stdout.strip()}", file=sys.stderr)
        return 1
    while replicas(raylet):
        if time.monotonic() > deadline:
            print(f"drain: {len(replicas(raylet))} replicas still run after {options.deadline_s} s", file=sys.stderr)
            return 1
        time.sleep(POLL_S)
    return 0


def deadline_s(command: Sequence[str]) -> int:
    """The deadline in a command line that runs this module; raises ValueError for any other command."""
    if list(command[1:3]) != ["-m", MODULE]:
        raise ValueError(f"{' '.join(command) or 'nothing'!r} does not run `python -m {MODULE}`")
    try:
        return int(_parser(exit_on_error=False).parse_args(command[3:]).deadline_s)
    except (argparse.ArgumentError, SystemExit) as error:
        raise ValueError(f"{' '.join(command)!r}: {error}") from None


def find_raylets(node_id: str | None = None) -> dict[str, psutil.Process]:
    """The Ray nodes of this machine (in a pod: this pod's one) by their id."""
    found = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        flags = [flag for flag in process.info["cmdline"] or [] if flag.startswith(NODE_ID_FLAG)]
        if process.info["name"] == "raylet" and flags:
            found[flags[0].removeprefix(NODE_ID_FLAG)] = process
    return {own: process for own, process in found.items() if node_id in (None, own)}


def announce(node_id: str, seconds: int) -> subprocess.CompletedProcess[str]:
    """Ray's own command; it finds the cluster by RAY_ADDRESS, as `ray start` left it or KubeRay set it."""
    return subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--node-id", node_id,
         "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the pod is being stopped",
         "--deadline-remaining-seconds", str(seconds)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def replicas(raylet: psutil.Process) -> list[psutil.Process]:
    """Serve's replicas that run on a Ray node; none when the node itself has ended."""
    try:
        return [child for child in raylet.children() if _title(child).startswith(REPLICA_TITLE)]
    except psutil.NoSuchProcess:
        return []


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def _parser(exit_on_error: bool = True) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", exit_on_error=exit_on_error)
    parser.add_argument("--deadline-s", type=int, required=True, help="how long the replicas may take (seconds)")
    parser.add_argument("--node-id", help="which Ray node, where several run on one machine")
    return parser


if __name__ == "__main__":
    sys.exit(main())
