"""Two models behind one endpoint, and adapters loaded and unloaded under load: no wrong answer.

    python -m tests.campaigns.service.models [--requests 400] [--cycles 12]

(``make models``). A Llama and a Gemma-3 hybrid with random weights, each with a prefill and a
decode engine. The reference is transformers, with an adapter's weights added to the model's. The
phases:

    models     requests to both models, by name and by alias, streamed and not, eight at a time
    adapters   the same, while adapters of the Llama are loaded and unloaded; one name gets the
               weights of another path, so that KV of the previous ones would be wrong
    restart    the Llama's decode engine is killed; the new one takes the adapter of its peers

A request for an adapter may get 404 while it is being loaded or unloaded, never another answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
import yaml
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from app.demo.paths import MODEL_DIR
from testing import models
from testing.adapters import RANK, lora_adapter
from testing.service_process import ROOT, ServiceProcess
from testing.sse import events

CONCURRENCY = 8
PROMPTS = 12
PROMPT_TOKENS = (24, 300)
MAX_TOKENS = 8
TOLERANCE = 2e-3
"""Largest difference of a token's log probability between vLLM and transformers."""

APART = 20 * TOLERANCE
"""Least difference of the log probabilities of two models or adapters, for a usable prompt."""

LLAMA, ALIAS, GEMMA = "llama", "llama-alias", "gemma"
SLOTS = 5
REQUEST_TIMEOUT_S = 240.0
RESTART_TIMEOUT_S = 240.0

Reference = tuple[list[int], list[float]]
"""Tokens of an answer and their log probabilities."""


@dataclass
class Tally:
    """Outcomes of one phase."""

    phase: str
    requests: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    refused: int = 0
    """Number of 404 answers while the adapter was being loaded or unloaded."""
    routes: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)


@dataclass
class World:
    """Models, adapters and the right answers."""

    paths: dict[str, str]
    adapters: dict[str, Path]
    """Folders of the adapters, by their weights."""
    prompts: list[list[int]]
    answers: dict[tuple[str, int], Reference]
    """Right answers by (model or weights of an adapter, prompt)."""


def make_world(folder: Path) -> World:
    """Create models and adapters, and keep the prompts whose answers tell all of them apart."""
    paths = {LLAMA: models.llama(folder / LLAMA, seed=1), GEMMA: models.gemma3(folder / GEMMA, seed=2)}
    for path in paths.values():
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(MODEL_DIR / name, path)
    weights = ("one", "two", "three")
    adapters = {name: lora_adapter(folder / name, Path(paths[LLAMA]), seed) for seed, name in enumerate(weights, 11)}
    rng = random.Random(3)
    prompts = [[rng.randrange(10, 500) for _ in range(rng.randint(*PROMPT_TOKENS))] for _ in range(4 * PROMPTS)]
    answers: dict[tuple[str, int], Reference] = {}
    sources: list[tuple[str, str, Path | None]] = [(name, path, None) for name, path in paths.items()]
    sources += [(name, paths[LLAMA], path) for name, path in adapters.items()]
    for name, path, adapter in sources:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        if adapter is not None:
            _add(model, adapter)
        for number, prompt in enumerate(prompts):
            if (answer := _answer(model, prompt)) is not None:
                answers[name, number] = answer
    names = [name for name, _, _ in sources]
    usable = [number for number in range(len(prompts)) if _tells_apart(answers, names, number)][:PROMPTS]
    assert len(usable) >= PROMPTS // 2, f"only {len(usable)} prompts tell the models apart"
    chosen = {(name, index): answers[name, number] for index, number in enumerate(usable) for name in names}
    return World(paths, adapters, [prompts[number] for number in usable], chosen)


def _add(model: Any, adapter: Path) -> None:
    """Add the weights of `adapter`, whose scale is 1, to those of `model`."""
    parts = load_file(adapter / "adapter_model.safetensors")
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, a in parts.items():
            if name.endswith("lora_A.weight"):
                target = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight") + ".weight"
                own[target] += parts[name.replace("lora_A", "lora_B")] @ a


def _answer(model: Any, prompt: list[int]) -> Reference | None:
    """Return the greedy answer; None if two tokens are so close that rounding decides."""
    tokens, logprobs = list(prompt), []
    with torch.no_grad():
        for _ in range(MAX_TOKENS):
            scores = model(torch.tensor([tokens])).logits[0, -1].log_softmax(-1)
            first, second = scores.topk(2).values.tolist()
            if first - second < 2 * TOLERANCE:
                return None
            tokens.append(int(scores.argmax()))
            logprobs.append(first)
    return tokens[len(prompt) :], logprobs


def _tells_apart(answers: dict[tuple[str, int], Reference], names: list[str], number: int) -> bool:
    found = [answers.get((name, number)) for name in names]
    if any(one is None for one in found):
        return False
    return all(
        one[0] != other[0] or max(abs(a - b) for a, b in zip(one[1], other[1], strict=True)) > APART
        for i, one in enumerate(found)
        for other in found[:i]
        if one is not None and other is not None
    )


class Client:
    """Client that sends requests and judges the answers."""

    def __init__(self, url: str, world: World) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S)
        self.world = world
        self.tally = Tally("")

    async def ask(self, name: str, weights: str, prompt: int, stream: bool, may_be_refused: bool = False) -> bool:
        """Send one request; return whether it was answered. `weights` are those that `name` has."""
        body = {
            "model": name,
            "prompt": self.world.prompts[prompt],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": 1,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        tally = self.tally
        tally.requests += 1
        tally.models[name] += 1
        try:
            reply = await self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            tally.failed.append(f"{name}: {error!r}")
            return False
        if reply.status_code == 404 and may_be_refused:
            tally.refused += 1
            return False
        if reply.status_code != 200:
            tally.failed.append(f"{name}: {reply.status_code} {reply.text[:300]}")
            return False
        tally.routes[reply.headers["x-tandem-route"]] += 1
        try:
            choices = [event["choices"][0] for event in events(reply.content) if event["choices"]] if stream else None
        except (AssertionError, KeyError) as error:
            tally.failed.append(f"{name}: {error!r}")
            return False
        choices = choices or [reply.json()["choices"][0]]
        tokens = [token for choice in choices for token in choice["token_ids"] or ()]
        logprobs = [value for one in choices if one.get("logprobs") for value in one["logprobs"]["token_logprobs"]]
        wanted, expected = self.world.answers[weights, prompt]
        far = max((abs(a - b) for a, b in zip(logprobs, expected, strict=False)), default=1.0)
        if tokens != wanted or len(logprobs) != len(expected) or far > TOLERANCE:
            like = [
                other for (other, number), one in self.world.answers.items() if number == prompt and one[0] == tokens
            ]
            tally.wrong.append(f"{name} ({weights}), prompt {prompt}: {tokens}, not {wanted}; {far:.4f}; as {like}")
        return True

    async def load(self, name: str, path: Path | str, base: str = LLAMA) -> httpx.Response:
        body = {"lora_name": name, "lora_path": str(path), "base_model_name": base}
        return await self._http.post("/v1/load_lora_adapter", json=body)

    async def unload(self, name: str) -> httpx.Response:
        return await self._http.post("/v1/unload_lora_adapter", json={"lora_name": name})

    async def post(self, path: str, body: object) -> httpx.Response:
        return await self._http.post(path, json=body)

    async def get(self, path: str) -> httpx.Response:
        return await self._http.get(path)

    async def names(self) -> list[str]:
        return [one["id"] for one in (await self.get("/v1/models")).json()["data"]]

    async def close(self) -> None:
        await self._http.aclose()


async def mixed(client: Client, requests: int, done: asyncio.Event | None = None) -> None:
    """Send requests to both models, `CONCURRENCY` at a time: so many, or until `done`."""
    rng = random.Random(7)
    left = iter(range(requests) if done is None else iter(int, 1))

    async def one_after_the_other() -> None:
        for _ in left:
            if done is not None and done.is_set():
                return
            name = rng.choice((LLAMA, ALIAS, GEMMA))
            weights = LLAMA if name == ALIAS else name
            await client.ask(name, weights, rng.randrange(len(client.world.prompts)), rng.random() < 0.5)

    await asyncio.gather(*(one_after_the_other() for _ in range(CONCURRENCY if done is None else CONCURRENCY // 2)))


class Adapter:
    """A name under which clients ask for adapters, and the weights that it has now.

    ``weights``  the weights; None while they may change
    """

    def __init__(self, client: Client, name: str) -> None:
        self.name = name
        self.weights: str | None = None
        self.loads: list[str] = []
        self._client = client

    async def ask_until(self, done: asyncio.Event) -> None:
        """Ask for the adapter: the answer must be that of weights that it had meanwhile."""
        rng = random.Random(self.name)
        tally = self._client.tally
        while not done.is_set():
            before, seen = self.weights, len(self.loads)
            if before is None and (not self.loads or rng.random() < 0.7):
                await asyncio.sleep(0.05)
                continue
            prompt, stream = rng.randrange(len(self._client.world.prompts)), rng.random() < 0.5
            wrong = len(tally.wrong)
            sent = self._client.ask(self.name, before or self.loads[-1], prompt, stream, may_be_refused=True)
            answered = await sent
            changed = self.weights is None or len(self.loads) > seen or before is None
            if not changed and not answered:
                tally.failed.append(f"{self.name}: refused although it is loaded")
            elif changed and len(tally.wrong) > wrong:
                # Sent while a change ran: the answer of any weights that the name had since.
                like = tally.wrong[-1].rpartition("; as ")[2]
                if any(repr(weights) in like for weights in self.loads[max(seen - 1, 0) :]):
                    del tally.wrong[-1]

    async def change(self, weights: str) -> None:
        """Unload the adapter if it is loaded, and load other weights under its name."""
        client = self._client
        if self.weights is not None:
            self.weights = None
            reply = await client.unload(self.name)
            assert reply.status_code == 200, reply.text
        self.loads.append(weights)
        reply = await client.load(self.name, client.world.adapters[weights])
        assert reply.status_code == 200, reply.text
        assert reply.text == f"Success: LoRA adapter '{self.name}' added successfully."
        self.weights = weights


async def check_surface(client: Client) -> None:
    """Check the list of models, unknown models, and refused changes of adapters."""
    assert await client.names() == [LLAMA, ALIAS, GEMMA], await client.names()
    health = (await client.get("/health")).json()
    assert health["models"] == {name: {"prefill": 1, "decode": 1} for name in (LLAMA, GEMMA)}, health
    unknown = await client.post("/v1/completions", {"model": "nobody", "prompt": [1, 2]})
    message = f"The model `nobody` does not exist. Valid aliases: {LLAMA}, {ALIAS}, {GEMMA}."
    error = {"message": message, "type": "NotFoundError", "param": "model", "code": 404}
    assert (unknown.status_code, unknown.json()) == (404, {"error": error}), unknown.text
    nowhere = await client.load("lost", "/nowhere")
    assert nowhere.status_code in (404, 500), nowhere.text
    print(f"an adapter that does not exist: {nowhere.status_code} {nowhere.text[:160]}", flush=True)
    other = await client.load("lost", "/nowhere", GEMMA)
    assert other.status_code == 404, other.text
    gone = await client.unload("lost")
    said = "The lora adapter 'lost' cannot be found."
    assert (gone.status_code, gone.json()["error"]["message"]) == (404, said), gone.text


async def change_under_load(client: Client, cycles: int) -> None:
    """Change adapters `cycles` times under requests for them and for both models."""
    done = asyncio.Event()
    adapters = [Adapter(client, "tuned"), Adapter(client, "other")]
    load = asyncio.gather(mixed(client, 0, done), *(one.ask_until(done) for one in adapters for _ in range(2)))
    rng = random.Random(9)
    try:
        for turn in range(cycles):
            adapter = adapters[turn % 2]
            choices = [weights for weights in client.world.adapters if weights != adapter.weights]
            await adapter.change(rng.choice(choices))
            again = await client.load(adapter.name, client.world.adapters["one"])
            assert again.status_code == 400, again.text
            assert "already been loaded" in again.text, again.text
            assert {LLAMA, GEMMA, adapter.name} <= set(await client.names())
            await asyncio.sleep(1.5)
    finally:
        done.set()
        await load
    for adapter in adapters:
        assert (await client.unload(adapter.name)).status_code == 200
        assert not await client.ask(adapter.name, LLAMA, 0, False, may_be_refused=True)
    assert await client.names() == [LLAMA, ALIAS, GEMMA]


async def restart(client: Client, service: ServiceProcess) -> float:
    """Kill the Llama's decode engine; return the time until its adapter is answered again."""
    assert (await client.load("kept", client.world.adapters["two"])).status_code == 200
    assert await client.ask("kept", "two", 0, False)
    status = (await client.get("/tandem/status")).json()
    old = next(one["replica"] for one in status["engines"] if one["role"] == "decode" and one["model"] == LLAMA)
    victims = [
        process for process in service.processes() if "ServeReplica:tandem:Decode-llama" in " ".join(process.cmdline())
    ]
    assert victims, "the engine's actor cannot be found"
    victims[0].kill()
    began = time.monotonic()
    while time.monotonic() - began < RESTART_TIMEOUT_S:
        await asyncio.sleep(1)
        # The other model serves meanwhile.
        await client.ask(GEMMA, GEMMA, 1, True)
        engines = (await client.get("/tandem/status")).json()["engines"]
        decode = [one["replica"] for one in engines if one["role"] == "decode" and one["model"] == LLAMA]
        if decode and decode != [old]:
            break
    else:
        raise RuntimeError("the decode engine did not return")
    took_s = time.monotonic() - began
    for prompt in range(len(client.world.prompts)):
        assert await client.ask("kept", "two", prompt, False)
        assert await client.ask(LLAMA, LLAMA, prompt, False)
    return took_s


async def pools_at_baseline(client: Client, within_s: float = 30.0) -> bool:
    """Return whether no engine holds a block of KV."""
    give_up_at = time.monotonic() + within_s
    while time.monotonic() < give_up_at:
        text = (await client.get("/metrics")).text
        families = [one for one in text_string_to_metric_families(text) if one.name == "vllm:kv_cache_usage_perc"]
        used = [sample.value for family in families for sample in family.samples]
        if len(used) == 4 and not any(used):
            return True
        await asyncio.sleep(1.5)
    return False


@contextmanager
def service_of_two_models(folder: Path, world: World) -> Iterator[ServiceProcess]:
    config = yaml.safe_load((ROOT / "configs" / "two-models.yaml").read_text())
    args = config["applications"][0]["args"]
    lora = {"enable_lora": True, "max_loras": SLOTS, "max_cpu_loras": SLOTS, "max_lora_rank": RANK}
    for one, name in zip(args["models"], (LLAMA, GEMMA), strict=True):
        one["model"] = world.paths[name]
        one["served_model_name"] = [LLAMA, ALIAS] if name == LLAMA else name
        one["engine"] = {"max_model_len": 1024, "block_size": 32, "max_num_batched_tokens": 128, "max_num_seqs": 8}
        one["allow_runtime_lora_updating"] = name == LLAMA
    args["models"][0]["engine"] |= lora
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    service = ServiceProcess(path, folder)
    service.start()
    try:
        yield service
    finally:
        left = service.stop()
        print(f"{len(left)} processes left", flush=True)


async def run(service: ServiceProcess, world: World, requests: int, cycles: int) -> list[Tally]:
    client = Client(service.url, world)
    tallies: list[Tally] = []

    def phase(name: str) -> None:
        client.tally = Tally(name)
        tallies.append(client.tally)

    def report() -> None:
        one = client.tally
        print(
            f"{one.phase}: {one.requests} requests {dict(one.models)}, {len(one.wrong)} wrong, "
            f"{len(one.failed)} failed, {one.refused} refused during a change, {dict(one.routes)}",
            flush=True,
        )
        for line in (*one.wrong[:10], *one.failed[:10]):
            print("   ", line, flush=True)

    try:
        await check_surface(client)
        phase("models")
        await mixed(client, requests)
        report()
        phase("adapters")
        await change_under_load(client, cycles)
        report()
        phase("restart")
        took_s = await restart(client, service)
        report()
        print(f"the new decode engine had its peers' adapter after {took_s:.0f} s", flush=True)
        clean = await pools_at_baseline(client)
        print(f"block pools {'at baseline' if clean else 'NOT at baseline'}", flush=True)
        if not clean:
            client.tally.failed.append("blocks of KV are left")
    finally:
        await client.close()
    return tallies


def main() -> int:
    """Return 1 if a request failed or was answered wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--cycles", type=int, default=12)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service must not outlive this process
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tandem-models-") as name:
        folder = Path(name)
        world = make_world(folder)
        print(f"{len(world.prompts)} prompts tell the two models and the three adapters apart", flush=True)
        try:
            with service_of_two_models(folder, world) as service:
                tallies = asyncio.run(run(service, world, options.requests, options.cycles))
        except BaseException:
            log = folder / "service.log"
            if log.is_file():
                kept = Path(tempfile.gettempdir()) / "tandem-models-service.log"
                shutil.copy(log, kept)
                print(f"the service's log: {kept}", flush=True)
            raise
    wrong, failed = (sum(len(getattr(one, kind)) for one in tallies) for kind in ("wrong", "failed"))
    print(json.dumps({"requests": sum(one.requests for one in tallies), "wrong": wrong, "failed": failed}))
    return 1 if wrong or failed else 0


if __name__ == "__main__":
    sys.exit(main())
