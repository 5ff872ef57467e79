"""Two models behind one endpoint, and adapters loaded and unloaded under load: no wrong answer.

A Llama and a Gemma-3 hybrid with random weights, each with a prefill and a decode engine. Decode
alone gives the right answers, before the load, to prompts that tell all models and adapters apart.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from app.demo.paths import MODEL_DIR
from testing import models as tiny
from testing.adapters import RANK, lora_adapter
from testing.service_process import ROOT, ServiceProcess
from testing.sse import events
from tests.campaigns.runner import Report
from tests.campaigns.service.world import engine_processes, leaks, service, status, until

LLAMA, ALIAS, GEMMA = "llama", "llama-alias", "gemma"
WEIGHTS = ("one", "two", "three")
PROMPTS = 12
MAX_TOKENS = 8
MARGIN = 4e-3
"""Least margin of each token's logprob: float32 sums in another order must not change the text."""


@contextmanager
def two_models(report: Report) -> Iterator[ServiceProcess]:
    paths = {LLAMA: tiny.llama(report.folder / LLAMA, seed=1), GEMMA: tiny.gemma3(report.folder / GEMMA, seed=2)}
    config = yaml.safe_load((ROOT / "configs" / "two-models.yaml").read_text())
    shape = {"max_model_len": 1024, "block_size": 32, "max_num_batched_tokens": 128, "max_num_seqs": 8}
    lora = {"enable_lora": True, "max_loras": 5, "max_cpu_loras": 5, "max_lora_rank": RANK}
    for one, (name, path) in zip(config["applications"][0]["args"]["models"], paths.items(), strict=True):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL_DIR / file, path)
        one |= {"model": path, "served_model_name": [LLAMA, ALIAS] if name == LLAMA else name}
        one |= {"engine": shape | (lora if name == LLAMA else {}), "allow_runtime_lora_updating": name == LLAMA}
    for seed, name in enumerate(WEIGHTS, 11):
        lora_adapter(report.folder / name, Path(paths[LLAMA]), seed)
    (report.folder / "config.yaml").write_text(yaml.safe_dump(config))
    with service(report, report.folder / "config.yaml") as running:
        yield running


class World:
    """The right answers, by weights and prompt, and the requests that are compared with them."""

    def __init__(self, report: Report, http: httpx.AsyncClient) -> None:
        self.report = report
        self.http = http
        self.prompts: list[list[int]] = []
        self.right: dict[tuple[str, int], list[int]] = {}
        self.counts: Counter[str] = Counter()

    async def load(self, name: str, weights: str, base: str = LLAMA) -> int:
        body = {"lora_name": name, "lora_path": str(self.report.folder / weights), "base_model_name": base}
        return (await self.http.post("/v1/load_lora_adapter", json=body)).status_code

    async def unload(self, name: str) -> int:
        return (await self.http.post("/v1/unload_lora_adapter", json={"lora_name": name})).status_code

    async def names(self) -> list[str]:
        return [one["id"] for one in (await self.http.get("/v1/models")).json()["data"]]

    async def post(self, name: str, prompt: list[int], **more: Any) -> httpx.Response:
        body = {"model": name, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        return await self.http.post("/v1/completions", json=body | {"return_token_ids": True, **more})

    async def learn(self, damage: float) -> None:
        """Keep prompts whose answers are certain and differ for all models and adapters."""
        for weights in WEIGHTS:
            assert await self.load(weights, weights) == 200
        rng = random.Random(3)
        while len(self.prompts) < PROMPTS:
            prompt = [rng.randrange(10, 500) for _ in range(rng.randint(24, 300))]
            found: dict[str, list[int]] = {}
            for name in (LLAMA, GEMMA, *WEIGHTS):
                reply = await self.post(name, prompt, prompt_logprobs=0, logprobs=2)
                choice = reply.raise_for_status().json()["choices"][0]
                tops = [sorted(top.values()) for top in choice["logprobs"]["top_logprobs"]]
                if min(top[-1] - top[-2] for top in tops) > MARGIN:
                    found[name] = choice["token_ids"]
            if len(found) == 2 + len(WEIGHTS) == len(set(map(tuple, found.values()))):
                for name, tokens in found.items():
                    self.right[name, len(self.prompts)] = tokens if rng.random() >= damage else tokens[::-1]
                self.prompts.append(prompt)
        for weights in WEIGHTS:
            assert await self.unload(weights) == 200

    async def ask(self, name: str, allowed: list[str], rng: random.Random, may_be_refused: bool = False) -> bool:
        """Send one request; return whether it had an answer. It must be of ``allowed`` weights."""
        number, stream = rng.randrange(PROMPTS), rng.random() < 0.5
        reply = await self.post(name, self.prompts[number], stream=stream)
        self.counts[f"{name} {reply.status_code} {reply.headers.get('x-tandem-route', '')}"] += 1
        if reply.status_code == 404 and may_be_refused:
            return False
        if reply.status_code != 200:
            self.report.problem(f"{name}: HTTP {reply.status_code} {reply.text[:200]}")
            return False
        choices = (
            [one["choices"][0] for one in events(reply.content) if one["choices"]]
            if stream
            else reply.json()["choices"]
        )
        tokens = [token for choice in choices for token in choice["token_ids"] or ()]
        if tokens not in [self.right[weights, number] for weights in allowed]:
            like = [weights for (weights, at), right in self.right.items() if at == number and right == tokens]
            self.report.problem(f"{name}, prompt {number}: the answer of {like or 'nothing'}, not of {allowed}")
        return True

    async def both_models(self, count: int, done: asyncio.Event | None = None) -> None:
        rng = random.Random(7)
        left = iter(range(count) if done is None else iter(int, 1))

        async def client() -> None:
            for _ in left:
                if done is not None and done.is_set():
                    return
                name = rng.choice((LLAMA, ALIAS, GEMMA))
                await self.ask(name, [GEMMA if name == GEMMA else LLAMA], rng)

        await asyncio.gather(*(client() for _ in range(8 if done is None else 4)))


async def _adapters_under_load(world: World, changes: int) -> None:
    """A name gets other weights, again and again: KV of the previous ones would be wrong."""
    done = asyncio.Event()
    current: dict[str, list[str]] = {"tuned": [], "other": []}

    async def client(name: str, seed: int) -> None:
        rng = random.Random(seed)
        while not done.is_set():
            # Weights that the name has during the request: this list grows while a change runs.
            allowed = current[name]
            if not allowed:
                await asyncio.sleep(0.05)
                continue
            answered = await world.ask(name, allowed, rng, may_be_refused=True)
            if not answered and allowed is current[name] and len(allowed) == 1:
                world.report.problem(f"{name} is refused although it is loaded")

    clients = [client(name, seed) for seed in range(2) for name in current]
    load = asyncio.gather(world.both_models(0, done), *clients)
    rng = random.Random(9)
    try:
        for turn in range(changes):
            name = ("tuned", "other")[turn % 2]
            weights = rng.choice([one for one in WEIGHTS if one not in current[name]])
            if current[name]:
                current[name].append(weights)  # from here on, a request may get either
                world.report.equal(f"unload {name}", await world.unload(name), 200)
            world.report.equal(f"load {name}", await world.load(name, weights), 200)
            world.report.equal(f"load {name} again", await world.load(name, weights), 400)
            current[name] = [weights]
            await asyncio.sleep(1.5)
    finally:
        done.set()
        await load
    for name in current:
        world.report.equal(f"unload {name}", await world.unload(name), 200)
    world.report.equal("models at the end", await world.names(), [LLAMA, ALIAS, GEMMA])


async def _restart(world: World, running: ServiceProcess) -> None:
    """Kill the Llama's decode engine: the new one takes the adapter of its peers."""
    rng = random.Random(4)
    world.report.equal("load kept", await world.load("kept", "two"), 200)

    def replicas() -> list[str]:
        decode = [one for one in status(running.url)["engines"] if one["role"] == "decode" and one["model"] == LLAMA]
        return [one["replica"] for one in decode]

    old = replicas()
    engine_processes(running.processes(), "Decode-llama")[0].actor.kill()
    back = asyncio.create_task(asyncio.to_thread(until, lambda: replicas() not in ([], old), "decode is back"))
    while not back.done():
        await world.ask(GEMMA, [GEMMA], rng)  # the other model serves meanwhile
    await back
    for name, weights in (("kept", "two"), (LLAMA, LLAMA)) * PROMPTS:
        world.report.check(await world.ask(name, [weights], rng), f"{name} is not answered after the restart")


def models(report: Report, *, count: int = 400, changes: int = 12, damage: float = 0.0) -> None:
    """Requests to both models; ``changes`` of adapters under load; the death of a decode engine."""

    async def play(running: ServiceProcess) -> None:
        async with httpx.AsyncClient(base_url=running.url, timeout=240) as http:
            world = World(report, http)
            await world.learn(damage)
            for phase, work in (
                ("models", world.both_models(count)),
                ("adapters", _adapters_under_load(world, changes)),
                ("restart", _restart(world, running)),
            ):
                await work
                report.row(phase=phase, answers=json.loads(json.dumps(world.counts)))
                world.counts.clear()
        report.equal("not at baseline", await asyncio.to_thread(leaks, running.url), {})

    with two_models(report) as running:
        asyncio.run(play(running))
