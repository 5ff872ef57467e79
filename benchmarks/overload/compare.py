"""Goodput at 0.5 to 4 times the load that engines can serve, beside vllm-router and Ray Serve.

tandem       this service as deployed, with simulated engines (`engine.py`): one prefill, one decode
vllm-router  vLLM's router (Rust) in its prefill/decode mode before the same engines over HTTP
ray-serve    a plain Ray Serve deployment of one engine that does both, with Serve's HTTP proxy

URL=http://... measures a running service instead, with MODEL; TEXT_BYTES: bytes per token of its
random prompts. Arms get the same requests at one
time: open loop, Poisson arrivals, a third not streamed. A request is inside its deadline if its
first token (streams, then TOKEN_S per token) or whole answer comes within FIRST_S or WHOLE_S; its
client disconnects after PATIENCE times as long. Goodput is such requests per second. Then Tandem's
clients send BURST_LOAD for BURST_S, and retry when `Retry-After` tells.
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
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
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
from benchmarks.router.arms import run_module, start_vllm_router
from benchmarks.router.service import Instant, running
from configs.settings.base import RoleName
from configs.settings.router import RouterSettings
from testing.ports import free_port
from testing.programs import Program, stop
from testing.signals import interrupt_on_signals

SLOTS = 2 * MAX_NUM_SEQS
FIRST_S, WHOLE_S, TOKEN_S = 10.0, 30.0, 0.1
PROMPT_TOKENS, ANSWER_TOKENS, MAX_TOKENS = (100, 1500), 100, 400
"""Uniform; mean of an exponential distribution, and its limit."""
WARM_S = 20.0
BURST_LOAD, BURST_S, TRIES = 4.0, 30.0, 10


class Simulated(Instant):
    async def __init__(self, role: RoleName) -> None:  # type: ignore[misc]
        replica = serve.get_replica_context().replica_id.unique_id
        await self.open(role, replica, simulated(), "nothing to replay", SLOTS)
        self._rank_metadata[0]["kv_tokens"] = KV_TOKENS


@serve.ingress(simulated)
class Plain:
    """One engine in Ray Serve."""


def application(port: int) -> serve.Application:
    actor = serve.deployment(Simulated).options(
        ray_actor_options={"num_cpus": 0.1},
        request_router_config=RequestRouterConfig(request_router_class=DiscoveryRouter),
        max_ongoing_requests=SLOTS,
    )
    limits: dict[str, Any] = {"first_token_timeout_s": FIRST_S, "request_timeout_s": WHOLE_S, "keep_alive_s": None}
    settings = RouterSettings(http_port=port, access_log=False, **limits)
    prefill, decode = (actor.options(name=role.capitalize()).bind(role) for role in ("prefill", "decode"))
    return router_deployment(settings).bind(settings, [DeployedModel(prefill, decode)])


@dataclass
class Reply:
    began_at: float
    ended_at: float = 0.0
    status: int = 0
    good: bool = False
    preempted: int = 0
    retry_after_s: int = 0


@dataclass
class Load:
    rate: float
    seconds: float
    patience: float
    model: str
    text_bytes: int
    tries: int = 1

    def body(self, dice: random.Random) -> dict[str, Any]:
        answer = max(1, min(round(dice.expovariate(1 / ANSWER_TOKENS)), MAX_TOKENS))
        prompt = "".join(dice.choices("abcdefgh ", k=self.text_bytes * dice.randint(*PROMPT_TOKENS)))
        body = {"model": self.model, "prompt": prompt, "max_tokens": MAX_TOKENS, "stream": dice.random() < 2 / 3}
        if self.model == "instant":
            return body | {"answer_tokens": answer}
        return body | {"max_tokens": answer, "ignore_eos": True}  # the length of a real engine's answer

    async def ask(self, session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Reply:
        reply = Reply(time.monotonic())
        first_s, event, done, limit_s = 0.0, b"", not body["stream"], FIRST_S if body["stream"] else WHOLE_S
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(self.patience * limit_s) as bound, session.post(url, json=body) as response:
                reply.status = response.status
                reply.retry_after_s = int(response.headers.get("Retry-After", 0))
                event = await response.read() if done or response.status != 200 else b""
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        first_s, event = first_s or time.monotonic() - reply.began_at, line[6:]
                        bound.reschedule(asyncio.get_running_loop().time() + 3600)
                    done = done or line.startswith(b"data: [DONE]")
        reply.ended_at = time.monotonic()
        if reply.status == 200 and event and done and b'"error"' not in event:
            answer_s = TOKEN_S * body.get("answer_tokens", body["max_tokens"]) if body["stream"] else 0.0
            reply.good = first_s <= limit_s and reply.ended_at - reply.began_at <= limit_s + answer_s
            reply.preempted = json.loads(event).get("preempted", 0)
        return reply

    async def client(
        self, session: aiohttp.ClientSession, url: str, body: dict[str, Any], replies: list[list[Reply]]
    ) -> None:
        own: list[Reply] = []
        replies.append(own)
        while len(own) < self.tries:
            own.append(reply := await self.ask(session, f"{url}/v1/completions", body))
            if reply.status != 429:
                return
            await asyncio.sleep(reply.retry_after_s if len(own) < self.tries else 0)

    async def play(self, urls: dict[str, str]) -> dict[str, list[list[Reply]]]:
        """Send the same requests to each arm; return the replies to each when all have ended."""
        dice, due, sent = random.Random(f"{self.rate} {self.tries}"), time.monotonic(), []
        replies: dict[str, list[list[Reply]]] = {name: [] for name in urls}
        until = due + self.seconds
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            while due < until:
                await asyncio.sleep(max(due - time.monotonic(), 0))
                one = self.body(dice)
                sent += [asyncio.create_task(self.client(session, urls[arm], one, replies[arm])) for arm in urls]
                due += dice.expovariate(self.rate)
            await asyncio.gather(*sent)
        return replies


def report(replies: list[list[Reply]], began: float, seconds: float) -> dict[str, float]:
    counted = [one for own in replies for one in own if WARM_S <= one.ended_at - began < seconds]
    refused, admitted = ([one for one in counted if (one.status == 429) is no] for no in (True, False))
    return {
        "goodput": sum(one.good for one in counted) / (seconds - WARM_S),
        "refused": len(refused) / len(counted),
        "refused_after_s_p99": p99([one.ended_at - one.began_at for one in refused]) if len(refused) > 1 else 0.0,
        "retry_after_s": sum(one.retry_after_s for one in refused) / max(len(refused), 1),
        "admitted_late": sum(not one.good for one in admitted) / max(len(admitted), 1),
        "preemptions": sum(one.preempted for one in admitted) / max(sum(one.good for one in admitted), 1),
    }


async def measure(
    urls: dict[str, str],
    loads: tuple[float, ...],
    rate: float,
    seconds: float,
    patience: float,
    model: str,
    text_bytes: int,
) -> dict[str, Any]:
    found: dict[str, Any] = {name: {} for name in urls}
    for load in loads:
        began = time.monotonic()
        for name, replies in (await Load(load * rate, seconds, patience, model, text_bytes).play(urls)).items():
            found[name][str(load)] = row = report(replies, began, seconds)
            if model != "instant":
                del row["preemptions"]  # vLLM's answers do not report them
            print(f"{name:12} {load:4g}", "  ".join(f"{key} {value:.3f}" for key, value in row.items()), flush=True)
    burst = Load(BURST_LOAD * rate, BURST_S, patience, model, text_bytes, TRIES)
    replies = (await burst.play({"tandem": urls["tandem"]}))["tandem"]
    tries = [len(own) for own in replies if len(own) > 1]
    found["burst"] = {
        "requests": len(replies),
        "refused_once": len(tries) / len(replies),
        "taken_at_first_retry": tries.count(2) / max(len(tries), 1),
        "never": sum(own[-1].status == 429 for own in replies) / len(replies),
        "good": sum(own[-1].good for own in replies) / len(replies),
        "goodput": sum(own[-1].good for own in replies)
        / (max(own[-1].ended_at for own in replies) - min(own[0].began_at for own in replies)),
    }
    print("burst", found["burst"])
    return found


def main(
    *,
    seconds: float = 120.0,
    rate: float = 3.3,
    patience: float = 1.0,
    loads: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0),
    url: str = "",
    model: str = "instant",
    text_bytes: int = TEXT_BYTES,
    vllm_router: str = "",
) -> int:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        started, urls = list[Program](), {"tandem": url}
        stack.callback(stop, started)
        module = partial(run_module, started, Path(folder))
        if not url:
            proxy_port = free_port()
            _, urls["tandem"] = module("benchmarks.overload.compare", str(proxy_port))
            urls["ray-serve"] = f"http://127.0.0.1:{proxy_port}/plain"
            if vllm_router:
                prefill, decode = (module("benchmarks.overload.engine")[1] for _ in range(2))
                router, urls["vllm-router"] = start_vllm_router(vllm_router, Path(folder), prefill, decode)
                started.append(router)
        found = uvloop.run(measure(urls, loads, rate, seconds, patience, model, text_bytes))
    write("overload_url" if url else "overload", {"seconds": seconds, "rate": rate, "patience": patience, **found})
    found.pop("burst")
    rows = list(found["tandem"].values())
    peaks = accumulate((row["goodput"] for row in rows), max)  # admission may favor small requests: a late peak
    return failed(
        {
            "goodput below 95% of its peak": any(
                row["goodput"] < 0.95 * peak for row, peak in zip(rows, peaks, strict=True)
            ),
            "an admitted request was late": any(row["admitted_late"] for row in rows),
        }
    )


if __name__ == "__main__":
    proxy_port, port = map(int, sys.argv[1:])
    os.environ.setdefault("RAY_worker_niceness", "0")
    with suppress(KeyboardInterrupt), running(port, proxy_port, application(port)):
        plain = serve.deployment(Plain).options(max_ongoing_requests=SLOTS, ray_actor_options={"num_cpus": 0.1})
        serve.run(plain.bind(), name="plain", route_prefix="/plain")
        interrupt_on_signals()
        signal.pause()
