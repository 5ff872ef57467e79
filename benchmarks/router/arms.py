"""The processes of a run: instant engines, and the routers in front of them."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from testing.ports import free_port
from testing.programs import Program, start_module, stop


@dataclass(frozen=True)
class Arm:
    """One way to an engine: its address, and every program that works for it."""

    url: str
    programs: tuple[Program, ...]

    def cpu_s(self) -> float:
        """Return the processor time of its processes and their descendants, so far."""
        processes = [each for program in self.programs for each in program.processes()]
        return sum(used.user + used.system for used in (each.cpu_times() for each in processes))


def start_vllm_router(command: str, folder: Path, prefill: str, decode: str) -> tuple[Program, str]:
    """Start vLLM's router before these servers, and wait until it answers.

    Its health checks are so rare that it does not mark a stopped server as dead.
    """
    port = free_port()
    line = [command, "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--log-level", "error"]
    line += ["--policy", "round_robin", "--port", str(port), "--prometheus-port", str(free_port())]
    line += ["--health-check-interval-secs", "86400"]
    router, url = Program(line, folder / "vllm-router.log"), f"http://127.0.0.1:{port}"
    router.wait_until_up(f"{url}/health")
    return router, url


def run_module(started: list[Program], folder: Path, name: str, *arguments: str) -> tuple[Program, str]:
    """Run `python -m NAME ARGUMENTS PORT`, and wait until it answers at the returned URL."""
    port = free_port()
    started.append(program := start_module(folder / f"{name}-{port}.log", name, *arguments, str(port)))
    program.wait_until_up(f"http://127.0.0.1:{port}/health")
    return program, f"http://127.0.0.1:{port}"


def begin(stack: ExitStack, folder: Path, vllm_router: str, routers: int) -> dict[str, Arm]:
    """Start every arm; they end with the stack.

    ``vllm_router``  command of vLLM's router; empty for a run without it
    ``routers``      number of Tandem's routers
    """
    started: list[Program] = []
    stack.callback(stop, started)
    run = partial(run_module, started, folder)
    prefill, prefill_url = run("benchmarks.router.engine")
    decode, decode_url = run("benchmarks.router.engine")
    # Ray increases the niceness of its workers over that of the other arms' processes
    os.environ.setdefault("RAY_worker_niceness", "0")
    proxy_port = free_port()
    service, service_url = run("benchmarks.router.service", str(routers), str(proxy_port))
    proxy_url = f"http://127.0.0.1:{proxy_port}"
    service.wait_until_up(f"{proxy_url}/health")
    found = {
        "direct": Arm(decode_url, (decode,)),
        "tandem": Arm(service_url, (service,)),
        "tandem-proxy": Arm(proxy_url, (service,)),
    }
    if vllm_router:
        process, url = start_vllm_router(vllm_router, folder, prefill_url, decode_url)
        started.append(process)
        found["vllm-router"] = Arm(url, (process, prefill, decode))
    process, url = run("testing.sequential_proxy", "--prefill", prefill_url, "--decode", decode_url, "--port")
    return found | {"proxy": Arm(url, (process, prefill, decode))}
