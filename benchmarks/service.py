"""TTFT of Tandem's whole service, with Ray and router, compared with vLLM's NixlConnector.

    python -m benchmarks.service [--requests 12] [--lengths 200,1000,2000]
        [--vllm-router COMMAND] [--ray-llm PYTHON]

tandem       one streaming HTTP request to Tandem's router (one prefill, one decode replica, started
             as users start it)
nixl         two stock vLLM servers with NixlConnector and a client that knows both: it posts to
             prefill, then posts the answer's parameters to decode and streams. Without a router:
             the best case of that protocol
vllm-router  one streaming HTTP request to vLLM's own router (Rust, prefill/decode mode) before the
             same servers
ray-llm      one streaming HTTP request to Ray Serve LLM's own prefill/decode application
             (``testing/ray_llm.py``)

Time to first token runs from the first byte sent to the first streamed token received. Requests
alternate. The idle sides are stopped (``testing/processes.py``): all processes of the two servers
and their router, and the engine processes of the service. Ray's own processes always run, at the
expense of Tandem and of the other sides.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.report import ratios, summary, write
from testing.environment import ENVIRONMENT
from testing.models import VOCABULARY, benchmark_gemma3
from testing.ports import free_port
from testing.processes import Processes, free_cores
from testing.sequential_proxy import PRODUCE
from testing.service_process import ServiceProcess
from testing.vllm_server import start_vllm, stop, wait_until_up

ANSWER_TOKENS = 8
RAY_LLM_START_S = 400.0
POLL_S = 0.5
"""Interval between reads of the log of a process that takes minutes to start."""

READY = "ray serve llm: ready"
"""Line that `ray_llm.py` prints when its engines run.

It runs in another environment and cannot be imported.
"""

ENGINE = {
    "max_model_len": 4096,
    "block_size": 32,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
}


def first_token_ms(client: httpx.Client, url: str, body: dict[str, Any], started: float) -> float:
    """Stream a completion to its end; return milliseconds from ``started`` to its first token."""
    first = 0.0
    with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic()
                assert "choices" in json.loads(line[6:]), line
    return 1e3 * (first - started)


def through_router(client: httpx.Client, url: str, body: dict[str, Any]) -> float:
    return first_token_ms(client, url, body, time.monotonic())


def through_nixl(client: httpx.Client, prefill: str, decode: str, body: dict[str, Any]) -> float:
    started = time.monotonic()
    answer = client.post(
        f"{prefill}/v1/completions", json=body | {"max_tokens": 1, "kv_transfer_params": PRODUCE}
    ).raise_for_status()
    return first_token_ms(client, decode, body | {"kv_transfer_params": answer.json()["kv_transfer_params"]}, started)


def service_config(model: str, folder: Path) -> Path:
    """Return the shipped configuration with the benchmark's model and engine arguments."""
    config = yaml.safe_load((Path(__file__).parent.parent / "configs" / "local.yaml").read_text())
    args = config["applications"][0]["args"]
    args |= {"model": model, "served_model_name": "demo", "engine": ENGINE}
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start_router(command: Path, prefill: str, decode: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start vLLM's router before these servers, and wait until it answers.

    Its health checks are so rare that it does not mark a stopped server as dead.
    """
    port = free_port()
    line = [str(command), "--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode, "--log-level", "error"]
    line += ["--policy", "round_robin", "--port", str(port), "--prometheus-port", str(free_port())]
    line += ["--health-check-interval-secs", "86400"]
    with (folder / "vllm-router.log").open("wb") as log:
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    wait_until_up(f"{url}/health", process, folder)
    return process, url


def start_ray_llm(python: Path, model: str, folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start Ray Serve LLM's application in its own Ray cluster, and wait for its engines.

    Raises RuntimeError with its log's end.
    """
    port = free_port()
    line = [str(python), "-m", "testing.ray_llm", model, str(port)]
    line += [json.dumps(ENGINE | {"dtype": "float32", "enforce_eager": True})]
    path = folder / "ray-llm.log"
    with path.open("wb") as log:
        environment = os.environ | ENVIRONMENT
        process = subprocess.Popen(line, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    give_up_at = time.monotonic() + RAY_LLM_START_S
    # the application answers /v1/models long before it has an engine
    while READY not in path.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > give_up_at:
            stop([process] if process.poll() is None else [])
            raise RuntimeError(f"Ray Serve LLM did not start:\n{path.read_text(errors='replace')[-3000:]}")
        time.sleep(POLL_S)
    return process, f"http://127.0.0.1:{port}"


def engines(process: psutil.Process) -> list[int]:
    """Return the processes of vLLM's engines that `process` has started."""
    return [child.pid for child in process.children(recursive=True) if child.name().startswith("VLLM::")]


def measure(
    requests: int, lengths: list[int], folder: Path, vllm_router: Path | None = None, ray_llm: Path | None = None
) -> dict[str, Any]:
    model = benchmark_gemma3(folder / "model").path
    service = ServiceProcess(service_config(model, folder), folder)
    service.start()
    servers = []
    try:
        ports = [free_port(), free_port()]
        prefill, decode = (f"http://127.0.0.1:{port}" for port in ports)
        for number, (role, port) in enumerate(zip(("kv_producer", "kv_consumer"), ports, strict=True)):
            transfer = {"kv_connector": "NixlConnector", "kv_role": role}
            side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + 10 * number)}
            servers.append(start_vllm(folder, role, model, port, transfer, side_channel))
        for url, server in zip((prefill, decode), servers, strict=True):
            wait_until_up(f"{url}/health", server, folder)
        theirs = Processes([p.pid for s in servers for p in [*psutil.Process(s.pid).children(True)]])
        theirs.pids += [server.pid for server in servers]
        if vllm_router is not None:
            router, router_url = start_router(vllm_router, prefill, decode, folder)
            servers.append(router)
            theirs.pids.append(router.pid)
        ours = Processes([p.pid for p in service.processes() if p.name().startswith("VLLM::")])
        assert len(ours.pids) >= 4, "two engine cores and two workers"
        free_cores(theirs.pids + ours.pids)
        sides: dict[str, tuple[Processes, Callable[[httpx.Client, dict[str, Any]], float]]] = {
            "tandem": (ours, lambda client, body: through_router(client, service.url, body)),
            "nixl": (theirs, lambda client, body: through_nixl(client, prefill, decode, body)),
        }
        if vllm_router is not None:
            sides["vllm-router"] = (theirs, lambda client, body: through_router(client, router_url, body))
        if ray_llm is not None:
            for other in (ours, theirs):
                other.sleep()
            peer, peer_url = start_ray_llm(ray_llm, model, folder)
            servers.append(peer)
            rays = Processes(engines(psutil.Process(peer.pid)))
            assert len(rays.pids) >= 2, "two engines"
            free_cores(rays.pids)
            sides["ray-llm"] = (rays, lambda client, body: through_router(client, peer_url, body))
        return _alternate(sides, requests, lengths)
    finally:
        for pid in {pid for s in servers for pid in _tree(s.pid)}:
            psutil.Process(pid).resume()
        stop(servers)
        for process in service.processes():
            process.resume()
        service.stop()


def _tree(pid: int) -> list[int]:
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def _alternate(sides: dict[str, Any], requests: int, lengths: list[int]) -> dict[str, Any]:
    rng = random.Random(0)
    samples: dict[int, dict[str, list[float]]] = {length: {side: [] for side in sides} for length in lengths}
    for processes, _ in sides.values():
        processes.sleep()
    with httpx.Client(timeout=120) as client:
        for number in range(-2, requests):
            for length in lengths:
                prompt = [rng.randrange(3, VOCABULARY) for _ in range(length)]
                body = {
                    "model": "demo",
                    "prompt": prompt,
                    "max_tokens": ANSWER_TOKENS,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                for name in sorted(sides, reverse=bool((number + length) % 2)):
                    processes, send = sides[name]
                    with processes.awake():
                        ttft_ms = send(client, body)
                    if number >= 0:
                        samples[length][name].append(ttft_ms)
    return {
        str(length): {
            **{f"{side.replace('-', '_')}_ttft_ms": summary(values) for side, values in found.items()},
            "ratio": ratios(found["tandem"], found["nixl"]),
            **{
                f"ratio_over_{side.replace('-', '_')}": ratios(found["tandem"], found[side])
                for side in found.keys() - {"tandem", "nixl"}
            },
        }
        for length, found in samples.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=12, help="measured requests per length and side")
    parser.add_argument("--lengths", default="200,1000,2000", help="prompt tokens")
    parser.add_argument("--vllm-router", type=Path, help="command of vLLM's router; unset: measure without it")
    parser.add_argument("--ray-llm", type=Path, help="Python with Ray Serve LLM; unset: measure without it")
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        result = measure(arguments.requests, lengths, Path(folder), arguments.vllm_router, arguments.ray_llm)
    for length, row in result.items():
        print(f"{length} prompt tokens")
        for name, values in row.items():
            middle = values.get("median", values.get("of_medians"))
            print(f"    {name:28} {middle:10.2f} ({values['q1']:.2f}-{values['q3']:.2f})")
    print("written to", write("service", {"requests": arguments.requests, "prompt_tokens": result}))


if __name__ == "__main__":
    main()
