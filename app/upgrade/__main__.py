"""Bring the pods and limits of a RayService to its running cluster: `tandem upgrade [--plan]`.

First `kubectl apply -k` the changed overlay. Each run continues where the last one stopped; to
undo, apply the previous overlay and run again.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from app.upgrade.plan import CHANGED, HEAD, NOT_UPDATED, State, Step, differs, next_step, push, read, refusals

OPERATOR_S = 60
"""Seconds in which KubeRay's operator must update the RayCluster; in a trial it took 1 s."""

# Through kubectl exec, because policies keep the API server's proxy from the dashboard.
SERVE = """import os, urllib.request as u
r = u.Request("http://127.0.0.1:8265/api/serve/applications/")
r.add_header("Authorization", "Bearer " + os.environ.get("RAY_AUTH_TOKEN", ""))
print(u.urlopen(r, timeout=20).read().decode())"""


class UpgradeError(Exception):
    """The upgrade stopped; the message says why."""


def main(argv: list[str] | None = None) -> int:
    """Return 0 when nothing is left to do, else 1."""
    parser = argparse.ArgumentParser(prog="tandem upgrade", description=" ".join(__doc__.split()))
    parser.add_argument("-n", "--namespace", default="tandem", help="namespace of the service (tandem)")
    parser.add_argument("--context", help="cluster of the kubeconfig; default: the current one at the start")
    parser.add_argument("--service", default="tandem", help="name of the RayService (tandem)")
    parser.add_argument("--plan", action="store_true", help="print the kubectl commands and change nothing")
    parser.add_argument("--allow-gap", action="store_true", help="also replace pods of groups without room")
    parser.add_argument("--timeout-s", type=float, default=1800, help="limit for the replacement of one pod (1800)")
    parser.add_argument("--poll-s", type=float, default=3, help="seconds between two queries of the cluster (3)")
    options = parser.parse_args(argv)
    try:
        # Another shell may change the current context during the run. In a pod there is none.
        with suppress(UpgradeError):
            options.context = options.context or kubectl(options, "config", "current-context").strip()
        state = look(options)
        refused = [f"refused: {one}" for one in refusals(state, allow_gap=options.allow_gap)]
        print(*(refused or describe(state, options.namespace)), sep="\n", flush=True)
        if not refused and not options.plan:
            follow(options)
        return 1 if refused else 0
    except (UpgradeError, KeyboardInterrupt) as error:
        print(f"tandem upgrade: {str(error) or 'interrupted'}", file=sys.stderr)
        print("Run it again to continue. To undo, apply the previous overlay first.", file=sys.stderr)
        return 1


def describe(state: State, namespace: str) -> Iterator[str]:
    """Yield the plan: each command, and what else will happen."""
    old = state.old()
    commands = [*(push(state) if differs(state) else ()), *(one.deletion for one in old)]
    if commands:
        yield "Plan (the command waits between deletions; do not paste them):"
    yield from (shlex.join(("kubectl", "-n", namespace, *one)) for one in commands)
    if not commands:
        yield "Nothing to do: the cluster has the RayService's limits and pods."
    if {one.group for one in old} - {HEAD}:
        yield "Each pod is deleted only while all replicas run on Ready pods. It serves until its successor runs, at"
        yield "most for RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S. Engines exchange KV only within a release, so groups"
        yield "take turns; while no release has both roles, decode computes prompts alone. Each group keeps a spare pod"
        yield "until that has been idle for idleTimeoutSeconds."
    if any(one.group == HEAD and one not in old and not state.current(one) for one in state.pods):
        yield "The head keeps its old pod: without gcsFaultToleranceOptions, its deletion would end the cluster."


def follow(options: argparse.Namespace) -> None:
    """Take step after step; raise UpgradeError at a deadline."""
    pushed, since = False, time.monotonic()
    printed: tuple[str, ...] = ()
    while True:
        try:
            step = next_step(look(options), pushed=pushed)
        except UpgradeError as error:
            step = Step(awaited=(str(error),))
        for command in step.commands:
            print(shlex.join(("kubectl", "-n", options.namespace, *command)), flush=True)
            kubectl(options, *command)
            pushed, since = pushed or command[0] != "delete", time.monotonic()
        if step == Step():
            return print("Done.", flush=True)
        waited_s = time.monotonic() - since
        for reason in () if step.awaited == printed else step.awaited:
            print(f"  {waited_s:.0f} s: {reason}", flush=True)
        printed = step.awaited
        limit_s = OPERATOR_S if {NOT_UPDATED, CHANGED} & {*step.awaited} else options.timeout_s
        if step.awaited and waited_s > min(options.timeout_s, limit_s):
            raise UpgradeError(f"after {waited_s:.0f} s: {'; '.join(step.awaited)}")
        time.sleep(options.poll_s)


def look(options: argparse.Namespace) -> State:
    """Return the state of the cluster; Serve's part is empty while the head is away."""
    found = kubectl(options, "get", "rayservices.ray.io,rayclusters.ray.io,pods", "--output=json")
    try:
        state = read(json.loads(found)["items"], options.service)
    except KeyError:
        raise UpgradeError(f"namespace {options.namespace} has no running RayService {options.service}") from None
    for head in (one.name for one in state.pods if one.group == HEAD and one.ready):
        serve = json.loads(kubectl(options, "exec", head, "--", "python", "-c", SERVE))
        state = replace(state, applications=serve["applications"])
    return state


def kubectl(options: argparse.Namespace, *arguments: str) -> str:
    """Return what kubectl prints; raises UpgradeError with what it reports."""
    try:
        command = ("kubectl", "--namespace", options.namespace, f"--context={options.context or ''}", *arguments)
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UpgradeError(f"kubectl {arguments[0]}: {getattr(error, 'stderr', None) or error}".strip()) from None


if __name__ == "__main__":
    sys.exit(main())
