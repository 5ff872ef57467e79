"""Rolling restarts between two versions of the RPC protocol, under load: failed requests.

Tandem's service with instant engines: two routers, and two engines of each role. This checkout is
the older release. The later one is a copy of it with `EDITS`: its newest version is one higher, and
it supports this one, too. In that version both sides add a `Step` to each frame, a message that
this checkout cannot decode. A connection that used the wrong version would fail all its calls.

With OLDER, this checkout is the later release, and OLDER is the checkout of another revision.

Serve replaces the replicas one after the other while clients send requests all the time, streams
and others, each on its own connection:

1. engines to the later release: routers of the older one with engines of both
2. routers to the later release
3. engines back: routers of the later release with engines of both
4. routers back

The exit status is 0 if every answer was complete, and if after each phase the connections have the
version that both sides support.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import shutil
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from actors.router.peer_routers import STATUS_AGE_S
from actors.rpc.protocol import NEWEST_VERSION
from benchmarks.report import failed, write
from benchmarks.router.load import body, raw
from benchmarks.router.service import application, deploy, running
from testing.ports import free_port
from testing.service_process import ROOT

PACKAGES = ("actors", "app", "benchmarks", "configs", "connectors", "testing")
REPLICAS = 2
TOKENS, PACE_MS = 40, 25.0
"""Tokens of a stream, and time between two of them; some streams run in each replaced engine."""

REPORTED_S = 30.0
"""Limit of the wait until the status page reports the connections of the new replicas."""

EDITED_VERSION = NEWEST_VERSION + 1

EDITS = {
    "actors/rpc/messages.py": [
        (
            "\nMessage = RpcHello",
            '\nclass Step(msgspec.Struct, frozen=True, array_like=True, tag=100):\n    """End of a frame."""\n\n'
            "    messages: int\n\n\nMessage = Step | RpcHello",
        ),
    ],
    "actors/rpc/protocol.py": [
        (f"NEWEST_VERSION = {NEWEST_VERSION}\n", f"NEWEST_VERSION = {EDITED_VERSION}\n"),
        ("    RpcWelcome,\n", "    RpcWelcome,\n    Step,\n"),
        (
            "        return encode(messages)\n",
            f"        steps = [Step(len(messages))] if self.version == {EDITED_VERSION} else []\n"
            "        return encode([*messages, *steps])\n",
        ),
        (
            "        for message in self._frames.feed(data):\n",
            "        for message in self._frames.feed(data):\n"
            f"            if isinstance(message, Step) and self.version == {EDITED_VERSION}:\n"
            "                continue\n",
        ),
    ],
}
"""Replacements by file. Each text must occur in the file; all occurrences are replaced."""


def later_release(folder: Path) -> Path:
    """Copy this checkout to `folder` and apply EDITS; raises ValueError for one that finds nothing.

    EDITS include the newest version, so that the copy is that of the next release, whatever this
    checkout's is.
    """
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "results"))
    for name, edits in EDITS.items():
        text = (folder / name).read_text()
        for old, new in edits:
            if old not in text:
                raise ValueError(f"{name} does not contain {old!r}; adapt EDITS")
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


@dataclass
class Load:
    phase: str
    seconds: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)


class Clients(threading.Thread):
    """Thread that sends requests continuously; `load` is that of the current phase."""

    def __init__(self, port: int, clients: int) -> None:
        super().__init__()
        self.load = Load("before")
        self._port, self._clients = port, clients
        self._over = False

    def run(self) -> None:
        async def ask() -> None:
            await asyncio.gather(*(self._ask_forever(random.Random(number)) for number in range(self._clients)))

        asyncio.run(ask())

    def stop(self) -> None:
        self._over = True
        self.join()

    async def _ask_forever(self, rng: random.Random) -> None:
        while not self._over:
            load, stream = self.load, rng.random() < 0.7
            try:
                route = await self._ask(stream, rng.choice((200, 16_000)))
                load.outcomes[f"{'stream' if stream else 'whole'}, {route}"] += 1
            except (OSError, TimeoutError, ValueError) as error:
                load.failed[f"{type(error).__name__}: {str(error)[:200]}"] += 1
            await asyncio.sleep(rng.uniform(0, 0.05))

    async def _ask(self, stream: bool, size: int) -> str:
        """Return the route of a whole answer: local if the engines' release has no split calls."""
        data = body(size, TOKENS, PACE_MS)
        if not stream:
            data = data.replace(b'"stream": true', b'"stream": false')
        async with asyncio.timeout(120):
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            try:
                writer.write(raw(self._port, data))
                answer = await reader.read()
            finally:
                writer.transport.abort()
        complete = answer.count(b"made_ns") == TOKENS and b"[DONE]" in answer if stream else b'"usage"' in answer
        route = re.search(rb"x-tandem-route: (\w+)", answer)
        if not answer.startswith(b"HTTP/1.1 200 ") or route is None or not complete:
            raise ValueError(f"not a whole answer: {answer[:150]!r} ... {answer[-80:]!r}")
        return route[1].decode()


@dataclass(frozen=True)
class Release:
    """Source tree of one side, and its newest version."""

    tree: str
    newest: int

    @classmethod
    def of(cls, tree: Path) -> Release:
        """Return the release in a folder. Raises ValueError if it has no NEWEST_VERSION."""
        found = re.search(r"^NEWEST_VERSION = (\d+)$", (tree / "actors/rpc/protocol.py").read_text(), re.MULTILINE)
        if found is None:
            raise ValueError(f"{tree} has no versions of the RPC protocol")
        return cls(str(tree.resolve()), int(found[1]))


def replicas_by_tree() -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if title := re.match(r"ray::ServeReplica:tandem:(\w+)", " ".join(process.cmdline())):
                found["routers" if title[1] == "Router" else "engines", process.environ().get("PYTHONPATH", "")] += 1
    return found


Connections = list[tuple[str, tuple[int, ...] | None]]


def settled(url: str, with_routers: int, of_engines: int) -> Connections:
    """Return (role, versions of its connections) of each engine, once they `agree`, or after
    REPORTED_S; None for versions not reported.
    """
    give_up_at = time.monotonic() + REPORTED_S
    while True:
        engines = httpx.get(f"{url}/tandem/status", timeout=30).json()["engines"]
        found = sorted((one["role"], tuple(one["versions"]) if "versions" in one else None) for one in engines)
        if agree(found, with_routers, of_engines) or time.monotonic() > give_up_at:
            return found
        time.sleep(STATUS_AGE_S)  # the router returns a cached status for this time


def agree(found: Connections, with_routers: int, of_engines: int) -> bool:
    """Return whether each engine has one connection of version `with_routers` to each router.

    A prefill engine may also have one to each decode engine, of their newest version `of_engines`.
    """
    expected = {"decode": [[with_routers] * REPLICAS]}
    expected["prefill"] = [[with_routers] * REPLICAS + [of_engines] * decodes for decodes in range(REPLICAS + 1)]
    return len(found) == 2 * REPLICAS and all(
        versions is None or versions in [tuple(sorted(one)) for one in expected[role]] for role, versions in found
    )


def restart(older: Release, later: Release, clients: int, settle_s: float, loads: list[Load], wrong: list[str]) -> None:
    """Run all phases; append their loads to `loads`, and failed checks to `wrong`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"

    def build(routers: Release, engines: Release) -> Any:
        router_env, engine_env = {"PYTHONPATH": routers.tree}, {"PYTHONPATH": engines.tree}
        return application(port, replicas=REPLICAS, router_env=router_env, engine_env=engine_env)

    with running(port, None, build(older, older)):
        asking = Clients(port, clients)
        asking.start()
        try:
            for phase, routers, engines in (
                ("before", older, older),
                ("engines to the later release", older, later),
                ("routers to the later release", later, later),
                ("engines back", later, older),
                ("routers back", older, older),
            ):
                load = asking.load = Load(phase)
                loads.append(load)
                began = time.monotonic()
                if phase != "before":
                    deploy(build(routers, engines))
                time.sleep(settle_s)
                expected = min(routers.newest, engines.newest), engines.newest
                found, replicas = settled(url, *expected), replicas_by_tree()
                load.seconds = time.monotonic() - began
                print(
                    f"{phase:30} {load.seconds:5.0f} s, {load.outcomes.total():6d} answers {dict(load.outcomes)},"
                    f" {load.failed.total()} failed; versions of connections: {found}",
                    flush=True,
                )
                # Engines of version 1 do not call prefill for routers of version 2.
                alone = older.newest == 1 and phase in ("engines back", "routers back")
                local = sum(count for outcome, count in load.outcomes.items() if outcome.endswith("local"))
                if local and not alone:
                    wrong.append(f"{phase}: decode served {local} requests alone")
                if not agree(found, *expected):
                    wrong.append(f"{phase}: not all connections have version {expected[0]}")
                if replicas != {("routers", routers.tree): REPLICAS, ("engines", engines.tree): 2 * REPLICAS}:
                    wrong.append(f"{phase}: replicas run from {dict(replicas)}")
        finally:
            asking.stop()


def main(*, clients: int = 16, settle_s: float = 10.0, older: str = "") -> int:
    loads: list[Load] = []
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tandem-versions-") as folder:
        later = ROOT if older else later_release(Path(folder) / "later")
        releases = Release.of(Path(older) if older else ROOT), Release.of(later)
        # Ray puts the driver's folder before PYTHONPATH in the path of its workers.
        os.chdir(folder)
        restart(*releases, clients, settle_s, loads, wrong)
        os.chdir(ROOT)
    failures = sum((load.failed for load in loads), Counter[str]())
    answers = sum(load.outcomes.total() for load in loads)
    print(f"{answers + failures.total()} requests, {failures.total()} failed")
    for failure, count in failures.most_common(5):
        print(f"{count} x {failure}")
    rows = [{"phase": one.phase, "seconds": one.seconds, "answers": dict(one.outcomes)} for one in loads]
    write("versions", {"phases": rows, "failed": dict(failures), "wrong": wrong})
    return failed({"requests failed": bool(failures)} | dict.fromkeys(wrong, True))
