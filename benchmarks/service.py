"""TTFT of Tandem's whole service, with Ray and router, compared with vLLM's NixlConnector.

tandem       one streaming HTTP request to Tandem's router (one prefill, one decode replica, started
             as users start it)
nixl         two stock vLLM servers with NixlConnector and a client that knows both: it posts to
             prefill, then posts the answer's parameters to decode and streams. Without a router:
             the best case of that protocol
vllm-router  one streaming HTTP request to vLLM's own router (Rust, prefill/decode mode) before the
             same servers; VLLM_ROUTER is its command
ray-llm      one streaming HTTP request to Ray Serve LLM's own prefill/decode application
             (``testing/ray_llm.py``, run if RAY_LLM is given) with NixlConnector

CONNECTORS=1 runs Ray Serve LLM's application twice instead, with NixlConnector and with
TandemConnector (ray-llm-tandem): all sides together need more than 24 GB
of memory.

Time to first token runs from the first byte sent to the first streamed token received. Requests
alternate. The idle sides are stopped (``testing/processes.py``): all processes of the two servers
and their router, and the engine processes of the service. Ray's own processes always run, at the
expense of Tandem and of the other sides.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.engines import random_prompt
from benchmarks.report import ratios, spread, summary, turns, write
from benchmarks.router.arms import start_vllm_router
from testing.models import benchmark_gemma3
from testing.ports import free_port
from testing.processes import Processes, free_cores
from testing.programs import Program, stop
from testing.ray_llm import start as start_ray_llm
from testing.sequential_proxy import PRODUCE
from testing.servers import start_vllm
from testing.service_process import ServiceProcess, write_config

ANSWER_TOKENS = 8
ENGINE = {
    "max_model_len": 4096,
    "block_size": 32,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
}
Send = Callable[[httpx.Client, dict[str, Any]], float]
Side = tuple[Processes, Send]
CONNECTORS = {"ray-llm": "NixlConnector", "ray-llm-tandem": "TandemConnector"}


def first_token_at(client: httpx.Client, url: str, body: dict[str, Any]) -> float:
    """Stream a completion to its end; return the monotonic time of its first token."""
    first = 0.0
    with client.stream("POST", f"{url}/v1/completions", json=body | {"stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: {"):
                first = first or time.monotonic()
                assert "choices" in json.loads(line[6:]), line
    return first


def through_router(url: str) -> Send:
    return lambda client, body: first_token_at(client, url, body)


def through_nixl(prefill: str, decode: str) -> Send:
    def send(client: httpx.Client, body: dict[str, Any]) -> float:
        produce = body | {"max_tokens": 1, "kv_transfer_params": PRODUCE}
        answer = client.post(f"{prefill}/v1/completions", json=produce).raise_for_status().json()
        return first_token_at(client, decode, body | {"kv_transfer_params": answer["kv_transfer_params"]})

    return send


def asleep(stack: ExitStack, processes: list[psutil.Process]) -> Processes:
    """Stop these processes until their turn; they run again before the stack ends them."""
    found = Processes([one.pid for one in processes])
    free_cores(found.pids)
    stack.callback(found.wake)
    found.sleep()
    return found


def engines(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Return vLLM's processes: of each of two engines the core, and its workers if it has some."""
    found = [one for one in processes if one.name().startswith("VLLM::")]
    assert len(found) >= 2, processes
    return found


def start_ray_llms(stack: ExitStack, folder: Path, model: str, connectors: dict[str, str]) -> dict[str, Side]:
    """Start Ray Serve LLM with each connector, asleep; they end with the stack."""
    sides = {}
    for name, connector in connectors.items():
        peer, url = start_ray_llm(
            folder, model, ENGINE | {"dtype": "float32", "enforce_eager": True}, {"kv_connector": connector}
        )
        stack.callback(peer.stop)
        sides[name] = asleep(stack, engines(peer.processes())), through_router(url)
    return sides


def start_sides(stack: ExitStack, folder: Path, model: str, vllm_router: str, ray_llm: str) -> dict[str, Side]:
    """Start all sides, asleep; they end with the stack."""
    service = ServiceProcess(
        write_config("local.yaml", folder, model=model, served_model_name="demo", engine=ENGINE), folder
    )
    service.start()
    stack.callback(service.stop)
    sides = {"tandem": (asleep(stack, engines(service.processes())), through_router(service.url))}

    servers: list[Program] = []
    stack.callback(stop, servers)
    urls = []
    for number, role in enumerate(("kv_producer", "kv_consumer")):
        transfer = {"kv_connector": "NixlConnector", "kv_role": role}
        side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(5600 + 10 * number)}
        port = free_port()
        servers.append(start_vllm(folder / f"{role}.log", model, port, transfer, side_channel))
        urls.append(f"http://127.0.0.1:{port}")
    for url, server in zip(urls, servers, strict=True):
        server.wait_until_up(f"{url}/health")
    router_url = ""
    if vllm_router:
        router, router_url = start_vllm_router(vllm_router, folder, *urls)
        servers.append(router)
    theirs = asleep(stack, [one for server in servers for one in server.processes()])
    sides["nixl"] = theirs, through_nixl(*urls)
    if vllm_router:
        sides["vllm-router"] = theirs, through_router(router_url)
    if ray_llm:
        sides |= start_ray_llms(stack, folder, model, {"ray-llm": "NixlConnector"})
    return sides


def main(
    *,
    requests: int = 12,
    lengths: tuple[int, ...] = (200, 1000, 2000),
    vllm_router: str = "",
    ray_llm: str = "",
    connectors: bool = False,
) -> None:
    dice = random.Random(0)
    samples: dict[tuple[int, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        model = benchmark_gemma3(folder / "model").path
        if connectors:
            sides = start_ray_llms(stack, folder, model, CONNECTORS)
        else:
            sides = start_sides(stack, folder, model, vllm_router, ray_llm)
        client = stack.enter_context(httpx.Client(timeout=120))
        body = {"model": "demo", "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": True}
        for length, side, counted in turns(list(sides), requests, lengths, warm_up=2):
            processes, send = sides[side]
            body["prompt"] = random_prompt(dice, length)
            with processes.awake():
                started = time.monotonic()
                ttft_ms = 1e3 * (send(client, body) - started)
            if counted:
                samples[length, side].append(ttft_ms)
    result: dict[str, dict[str, Any]] = {}
    ours = "ray-llm-tandem" if connectors else "tandem"
    for length in lengths:
        row: dict[str, Any] = {}
        for side in sides:
            row[f"{side.replace('-', '_')}_ttft_ms"] = summary(samples[length, side])
            if side != ours:
                over = "ratio" if side == "nixl" else f"ratio_over_{side.replace('-', '_')}"
                row[over] = ratios(samples[length, ours], samples[length, side])
        result[str(length)] = row
        print(f"{length} prompt tokens")
        for side, values in row.items():
            print(f"    {side:28} {spread(values)}")
    write("connectors_in_ray_llm" if connectors else "service", {"requests": requests, "prompt_tokens": result})
