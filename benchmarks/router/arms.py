"""The processes of a run: instant engines, and the routers in front of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from testing.ports import free_port
from testing.service_process import ROOT

POLL_S = 0.25
"""Interval between checks of a starting process, which does not report when it is ready."""

START_S = 120.0
STOP_S = 40.0


@dataclass(frozen=True)
class Arm:
    """One way to an engine: its address, and every process that works for it."""

    name: str
    url: str
    processes: tuple[psutil.Process, ...]

    def cpu_s(self) -> float:
        """Return the processor time of its processes, engines included, so far."""
        return sum(used.user + used.system for used in (process.cpu_times() for process in self._family()))

    def _family(self) -> list[psutil.Process]:
        return [each for process in self.processes for each in (process, *process.children(recursive=True))]


def lead(arms: list[str], turn: int) -> list[str]:
    """Return the arms in the order of a round; each round begins with the next arm."""
    first = turn % len(arms)
    return arms[first:] + arms[:first]


@contextmanager
def module(folder: Path, name: str, *arguments: str) -> Iterator[psutil.Process]:
    """Run `python -m NAME ARGUMENTS` during the block."""
    with command(folder, name.rpartition(".")[2], [sys.executable, "-m", name, *arguments]) as process:
        yield process


@contextmanager
def command(folder: Path, name: str, line: list[str]) -> Iterator[psutil.Process]:
    """Run a process that logs to `folder`; it and its descendants end with the block."""
    with (folder / f"{name}.log").open("ab") as log:
        started = subprocess.Popen(line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    process = psutil.Process(started.pid)
    try:
        yield process
    finally:
        family = [process, *process.children(recursive=True)]
        started.terminate()
        _, left = psutil.wait_procs(family, timeout=STOP_S)
        for each in left:
            each.kill()
        started.wait()


def wait_until_up(url: str, process: psutil.Process, log: Path, path: str = "/health") -> None:
    """Wait until `path` answers 200.

    Raises RuntimeError with the log's end if the process ends before.
    """
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        try:
            if httpx.get(f"{url}{path}", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(POLL_S)
    raise RuntimeError(f"{url} did not answer:\n{log.read_text(encoding='utf-8', errors='replace')[-3000:]}")


def begin(stack: ExitStack, folder: Path, vllm_router: Path | None, routers: int = 1) -> dict[str, Arm]:
    """Start every arm.

    ``vllm_router``  command of vLLM's router; None for a run without it
    ``routers``      number of Tandem's routers
    """
    prefill_url, decode_url = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    engines = []
    for url in (prefill_url, decode_url):
        engine = stack.enter_context(module(folder, "benchmarks.router.engine", "--port", url.rpartition(":")[2]))
        wait_until_up(url, engine, folder / "engine.log")
        engines.append(engine)
    found = {"direct": Arm("direct", decode_url, (engines[1],))}
    both = ("--prefill", prefill_url, "--decode", decode_url)
    found |= tandem(stack, folder, routers)
    if vllm_router is not None:
        port = free_port()
        line = [str(vllm_router), "--vllm-pd-disaggregation", *both, "--policy", "round_robin", "--log-level", "error"]
        line += ["--port", str(port), "--prometheus-port", str(free_port())]
        process = stack.enter_context(command(folder, "vllm-router", line))
        wait_until_up(f"http://127.0.0.1:{port}", process, folder / "vllm-router.log")
        found["vllm-router"] = Arm("vllm-router", f"http://127.0.0.1:{port}", (process, *engines))
    port = free_port()
    process = stack.enter_context(module(folder, "benchmarks.router.proxy", *both, "--port", str(port)))
    wait_until_up(f"http://127.0.0.1:{port}", process, folder / "proxy.log")
    found["proxy"] = Arm("proxy", f"http://127.0.0.1:{port}", (process, *engines))
    return found


def tandem(stack: ExitStack, folder: Path, routers: int = 1) -> dict[str, Arm]:
    """Start Tandem's service with instant engines: one arm at its routers, one at Serve's proxy."""
    ports = [free_port(), free_port()]
    # Ray increases the niceness of its workers over that of the other arms' processes
    os.environ.setdefault("RAY_worker_niceness", "0")
    line = ("--port", str(ports[0]), "--proxy-port", str(ports[1]), "--routers", str(routers))
    process = stack.enter_context(module(folder, "benchmarks.router.service", *line))
    arms = {}
    for name, port in zip(("tandem", "tandem-proxy"), ports, strict=True):
        arms[name] = Arm(name, f"http://127.0.0.1:{port}", (process,))
        wait_until_up(arms[name].url, process, folder / "service.log")
    return arms
