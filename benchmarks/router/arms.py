"""The processes of a run: instant engines, and the routers in front of them."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from testing.ports import free_port
from testing.vllm_server import start_module, stop, wait_until_up

Process = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Arm:
    """One way to an engine: its address, and every process that works for it."""

    url: str
    processes: tuple[Process, ...]

    def cpu_s(self) -> float:
        """Return the processor time of its processes and their descendants, so far."""
        roots = [psutil.Process(process.pid) for process in self.processes]
        family = [each for root in roots for each in (root, *root.children(recursive=True))]
        return sum(used.user + used.system for used in (each.cpu_times() for each in family))


def start_vllm_router(command: str, folder: Path, prefill: str, decode: str) -> tuple[Process, str]:
    """Start vLLM's router before these servers, and wait until it answers.

    Its health checks are so rare that it does not mark a stopped server as dead.
    """
    port = free_port()
    line = [command, "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--log-level", "error"]
    line += ["--policy", "round_robin", "--port", str(port), "--prometheus-port", str(free_port())]
    line += ["--health-check-interval-secs", "86400"]
    with (folder / "vllm-router.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    wait_until_up(f"{url}/health", process, folder)
    return process, url


def run_module(started: list[Process], folder: Path, name: str, *arguments: str) -> tuple[Process, str]:
    """Run `python -m NAME ARGUMENTS PORT`, and wait until it answers at the returned URL."""
    port = free_port()
    process = start_module(folder, f"{name}-{port}", [name, *arguments, str(port)])
    started.append(process)
    wait_until_up(f"http://127.0.0.1:{port}/health", process, folder)
    return process, f"http://127.0.0.1:{port}"


def begin(stack: ExitStack, folder: Path, vllm_router: str, routers: int) -> dict[str, Arm]:
    """Start every arm; they end with the stack.

    ``vllm_router``  command of vLLM's router; empty for a run without it
    ``routers``      number of Tandem's routers
    """
    started: list[Process] = []
    stack.callback(stop, started)
    module = partial(run_module, started, folder)
    prefill, prefill_url = module("benchmarks.router.engine")
    decode, decode_url = module("benchmarks.router.engine")
    # Ray increases the niceness of its workers over that of the other arms' processes
    os.environ.setdefault("RAY_worker_niceness", "0")
    proxy_port = free_port()
    service, service_url = module("benchmarks.router.service", str(routers), str(proxy_port))
    proxy_url = f"http://127.0.0.1:{proxy_port}"
    wait_until_up(f"{proxy_url}/health", service, folder)
    found = {
        "direct": Arm(decode_url, (decode,)),
        "tandem": Arm(service_url, (service,)),
        "tandem-proxy": Arm(proxy_url, (service,)),
    }
    if vllm_router:
        process, url = start_vllm_router(vllm_router, folder, prefill_url, decode_url)
        started.append(process)
        found["vllm-router"] = Arm(url, (process, prefill, decode))
    process, url = module("testing.sequential_proxy", "--prefill", prefill_url, "--decode", decode_url, "--port")
    return found | {"proxy": Arm(url, (process, prefill, decode))}
