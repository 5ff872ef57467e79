"""Goodput at 0.5 to 4 times the load that the engines can serve, beside vLLM's router and Ray Serve.

tandem       this service as deployed, with simulated engines (`engine.py`): one prefill, one decode
vllm-router  vLLM's router (Rust) in its prefill/decode mode before the same engines over HTTP
ray-serve    a plain Ray Serve deployment of one engine that does both, with Serve's HTTP proxy

Arms get the same requests at the same time: open loop, Poisson arrivals, a third of them not
streamed. A request is inside its deadline if its first token (streams) or whole answer (the others)
comes within FIRST_S or WHOLE_S; then its client disconnects. Goodput is such requests per second.
Then clients of Tandem send BURST_LOAD for BURST_S and retry when `Retry-After` tells.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from ray import serve
from ray.serve.config import RequestRouterConfig

from actors.engine_pool.serve_discovery import DiscoveryRouter
from app.main import DeployedModel, router_deployment
from benchmarks.overload.engine import KV_TOKENS, MAX_NUM_SEQS, TEXT_BYTES, simulated
from benchmarks.report import failed, p99, write
from benchmarks.router.arms import Process, start_vllm_router
from benchmarks.router.service import Instant, running
from configs.settings.base import RoleName
from configs.settings.router import RouterSettings
from testing.ports import free_port
from testing.signals import interrupt_on_signals
from testing.vllm_server import start_module, stop, wait_until_up

SLOTS = 2 * MAX_NUM_SEQS
FIRST_S, WHOLE_S = 10.0, 30.0
TOKEN_S = 0.1
"""A stream's further tokens may take this long, on average."""
PROMPT, ANSWER, MAX_TOKENS = (100, 1500), 100, 400
"""Prompt tokens, uniform; mean answer tokens, exponential, and their limit."""
WARM_S = 20.0
BURST_LOAD, BURST_S, TRIES = 4.0, 30.0, 10


class Simulated(Instant):
    async def __init__(self, role: RoleName) -> None:  # type: ignore[misc]
        replica = serve.get_replica_context().replica_id.unique_id
        await self.open(role, replica, simulated(), "nothing to replay", SLOTS)
        self._rank_metadata[0]["kv_tokens"] = KV_TOKENS


@serve.deployment(max_ongoing_requests=SLOTS, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(simulated)
class Plain:
    """One engine in Ray Serve."""


def application(port: int) -> serve.Application:
    actor = serve.deployment(Simulated).options(
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(request_router_class=DiscoveryRouter),
        max_ongoing_requests=SLOTS,
    )
    settings = RouterSettings(
        http_port=port, access_log=False, first_token_timeout_s=FIRST_S, request_timeout_s=WHOLE_S, keep_alive_s=None
    )
    prefill, decode = (actor.options(name=role.capitalize()).bind(role) for role in ("prefill", "decode"))
    return router_deployment(settings).bind(settings, [DeployedModel(prefill, decode)])


@dataclass
class Reply:
    ended_at: float
    status: int
    took_s: float
    good: bool = False
    preempted: int = 0
    retry_after_s: int = 0


@dataclass
class Run:
    replies: list[Reply] = field(default_factory=list)
    tries: list[int] = field(default_factory=list)


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], patience: float) -> Reply:
    began = time.monotonic()

    def reply(status: int, good: bool = False, **more: int) -> Reply:
        now = time.monotonic()
        return Reply(now, status, now - began, good, **more)

    first_s = 0.0
    limit_s = FIRST_S if body["stream"] else WHOLE_S
    try:
        async with asyncio.timeout(patience * limit_s) as bound, session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                await response.read()
                return reply(response.status, retry_after_s=int(response.headers.get("Retry-After", 0)))
            event, done = b"", not body["stream"]
            if done:
                event = await response.read()
            async for line in response.content:
                first_s = first_s or time.monotonic() - began
                if line.startswith(b"data: {"):
                    event = line.removeprefix(b"data: ")
                    bound.reschedule(asyncio.get_running_loop().time() + 3600)
                done = done or line.startswith(b"data: [DONE]")
            found = json.loads(event)
    except (TimeoutError, aiohttp.ClientError, json.JSONDecodeError):
        return reply(0)
    if "preempted" not in found or not done:
        return reply(0)
    now_s = time.monotonic() - began
    good = (first_s <= limit_s and now_s <= limit_s + TOKEN_S * body["answer_tokens"]) if first_s else now_s <= limit_s
    return reply(200, good, preempted=found["preempted"])


async def client(session: aiohttp.ClientSession, url: str, body: dict[str, Any], run: Run, tries: int, patience: float) -> None:
    for number in range(1, tries + 1):
        reply = await ask(session, url, body, patience)
        run.replies.append(reply)
        if reply.status != 429 or number == tries:
            run.tries.append(number if reply.status != 429 else tries + 1)
            return
        await asyncio.sleep(reply.retry_after_s)


def body(dice: random.Random) -> dict[str, Any]:
    prompt = "".join(dice.choices("abcdefgh ", k=TEXT_BYTES * dice.randint(*PROMPT)))
    answer = max(1, min(round(dice.expovariate(1 / ANSWER)), MAX_TOKENS))
    stream = dice.random() < 2 / 3
    return {"model": "instant", "prompt": prompt, "max_tokens": MAX_TOKENS, "answer_tokens": answer, "stream": stream}


async def play(urls: dict[str, str], rate: float, seconds: float, patience: float, tries: int = 1) -> dict[str, Run]:
    """Send `rate` requests per second to each arm; return when all have ended."""
    dice, runs, due = random.Random(0), {name: Run() for name in urls}, time.monotonic()
    until, sent = due + seconds, []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        while due < until:
            await asyncio.sleep(max(due - time.monotonic(), 0))
            one = body(dice)
            sent += [asyncio.create_task(client(session, url, one, runs[name], tries, patience)) for name, url in urls.items()]
            due += dice.expovariate(rate)
        await asyncio.gather(*sent)
    return runs


def report(run: Run, began: float, seconds: float) -> dict[str, float]:
    counted = [one for one in run.replies if began + WARM_S <= one.ended_at < began + seconds]
    refused, admitted = ([one for one in counted if (one.status == 429) is no] for no in (True, False))
    return {
        "goodput": sum(one.good for one in counted) / (seconds - WARM_S),
        "refused": len(refused) / len(counted),
        "refused_after_s_p99": p99([one.took_s for one in refused]) if len(refused) > 1 else 0.0,
        "retry_after_s": sum(one.retry_after_s for one in refused) / max(len(refused), 1),
        "admitted_late": sum(not one.good for one in admitted) / max(len(admitted), 1),
        "preemptions": sum(one.preempted for one in admitted) / max(sum(one.good for one in admitted), 1),
    }


async def measure(urls: dict[str, str], rate: float, loads: tuple[float, ...], seconds: float, patience: float) -> dict[str, Any]:
    found: dict[str, Any] = {name: {} for name in urls}
    for load in loads:
        began = time.monotonic()
        for name, run in (await play(urls, load * rate, seconds, patience)).items():
            found[name][str(load)] = row = report(run, began, seconds)
            print(f"{name:12} {load:4g}", "  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    run = (await play({"tandem": urls["tandem"]}, BURST_LOAD * rate, BURST_S, patience, TRIES))["tandem"]
    retried = [tries for tries in run.tries if tries > 1]
    burst = {
        "requests": len(run.tries),
        "refused_once": len(retried) / len(run.tries),
        "taken_at_the_first_retry": sum(tries == 2 for tries in retried) / max(len(retried), 1),
        "never": sum(tries > TRIES for tries in run.tries) / len(run.tries),
    }
    print("burst", burst)
    return found | {"burst": burst}


def main(
    *, seconds: float = 120.0, rate: float = 3.3, patience: float = 1.0, loads: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0), vllm_router: str = ""
) -> int:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, started = Path(name), list[Process]()
        stack.callback(stop, started)

        def module(name: str, *ports: int) -> str:
            started.append(start_module(folder, f"{name}-{ports[-1]}", [name, *map(str, ports)]))
            wait_until_up(f"http://127.0.0.1:{ports[-1]}/health", started[-1], folder)
            return f"http://127.0.0.1:{ports[-1]}"

        proxy_port = free_port()
        urls = {"tandem": module("benchmarks.overload.compare", proxy_port, free_port())}
        urls["ray-serve"] = f"http://127.0.0.1:{proxy_port}/plain"
        if vllm_router:
            prefill, decode = (module("benchmarks.overload.engine", free_port()) for _ in range(2))
            router, urls["vllm-router"] = start_vllm_router(vllm_router, folder, prefill, decode)
            started.append(router)
        found = uvloop.run(measure(urls, rate, loads, seconds, patience))
    write("overload", {"seconds": seconds, "rate": rate, "loads": loads, "arms": found})
    rows = list(found["tandem"].values())
    peak = max(row["goodput"] for row in rows)
    return failed(
        {
            "goodput below 95% of its peak": any(row["goodput"] < 0.95 * peak for row in rows[1:]),
            "an admitted request was late": any(row["admitted_late"] for row in rows),
        }
    )


if __name__ == "__main__":
    proxy_port, port = map(int, sys.argv[1:])
    os.environ.setdefault("RAY_worker_niceness", "0")
    with suppress(KeyboardInterrupt), running(port, proxy_port, application(port)):
        serve.run(Plain.bind(), name="plain", route_prefix="/plain")
        interrupt_on_signals()
        signal.pause()
