"""Replace every replica of a busy service.

    python -m tests.campaigns.service.rolling_restart

Two routers, prefill and decode engines each of the demo model, under constant load with known
answers: completions and chats, streamed and not. Meanwhile an operator deploys a changed
configuration (Serve then replaces all replicas, and old ones drain), removes one replica of each
role, and adds it again. Writes a JSON report.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from testing.facts import RecallPrompt, exact, make_prompt
from testing.service_process import ServiceProcess, write_config
from testing.sse import said

MODEL = "tandem-demo"
APPLICATION = "tandem"
ENGINES = ("Prefill", "Decode")
DEPLOYMENTS = ("Router", *ENGINES)
CLIENTS = 4
QUESTIONS = 40
REQUEST_TIMEOUT_S = 300.0
PHASE_TIMEOUT_S = 1500.0
SETTLED_S = 5.0
PAUSE_S = 0.25
"""Pause of a client between two requests: engines start on the same cores, and clients without a
pause would slow them down.
"""


@dataclass
class Load:
    """Outcomes of the requests of one phase."""

    phase: str
    seconds: float = 0.0
    requests: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    routes: dict[str, int] = field(default_factory=dict)
    slowest_s: float = 0.0


class Clients:
    """Send requests continuously, each client the next after its answer.

    `load` is the current phase.
    """

    def __init__(self, url: str, load: Load) -> None:
        self.load = load
        self._url = url
        self._asked = 0
        self._questions: list[tuple[RecallPrompt, bool]] = []
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._ask_forever()) for _ in range(CLIENTS)]

    async def stop(self) -> None:
        """Stop each client after its current answer."""
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks)

    async def _ask_forever(self) -> None:
        me = asyncio.current_task()
        async with httpx.AsyncClient(base_url=self._url, timeout=REQUEST_TIMEOUT_S) as http:
            while me in self._tasks:
                self._asked += 1
                await self._ask(http, self._asked)
                await asyncio.sleep(PAUSE_S)

    async def learn(self) -> int:
        """Find out which questions the model answers right; return how many are left out.

        Decode alone is asked: these answers use no transferred KV, so errors in them are the
        model's own.
        """
        async with httpx.AsyncClient(base_url=self._url, timeout=REQUEST_TIMEOUT_S) as http:
            for number in range(QUESTIONS):
                rng = random.Random(f"rolling {number}")
                facts, chat = rng.choice((4, 20, 60, 120)), number % 2 == 1
                prompt = make_prompt(rng, facts, distance_facts=facts - 1)
                route, text = await _answer(http, prompt, chat, stream=False, prompt_logprobs=0)
                assert route == "local", "a request for the prompt's logprobs must take the local route"
                if exact(prompt, text):
                    self._questions.append((prompt, chat))
        return QUESTIONS - len(self._questions)

    async def _ask(self, http: httpx.AsyncClient, number: int) -> None:
        prompt, chat = self._questions[number // 2 % len(self._questions)]
        stream = number % 2 == 1
        began, load = time.monotonic(), self.load
        load.requests += 1
        try:
            route, text = await _answer(http, prompt, chat, stream)
        except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
            load.failed.append(f"request {number}: {type(error).__name__}: {str(error)[:300]}")
            return
        load.slowest_s = max(load.slowest_s, time.monotonic() - began)
        load.routes[route] = load.routes.get(route, 0) + 1
        if not exact(prompt, text):
            load.wrong.append(f"request {number}: {text!r} where {prompt.answer!r} is right")


async def _answer(
    http: httpx.AsyncClient, prompt: RecallPrompt, chat: bool, stream: bool, **more: object
) -> tuple[str, str]:
    """Return the request's route and its text."""
    asked = {"messages": [{"role": "user", "content": prompt.text}]} if chat else {"prompt": prompt.text}
    body = {"model": MODEL, "temperature": 0, "max_tokens": 12, "stream": stream, **asked, **more}
    reply = await http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert reply.status_code == 200, f"HTTP {reply.status_code}: {reply.text}"
    choice = said(reply.content) if stream else reply.json()["choices"][0]
    text = choice["text"] if not chat else choice["delta"]["content"] if stream else choice["message"]["content"]
    return reply.headers["x-tandem-route"], str(text)


class Operator:
    """Client of Serve that changes a running service's configuration, as `serve deploy` does."""

    def __init__(self, service: ServiceProcess) -> None:
        import ray
        from ray.serve.context import _get_global_client

        self._config: dict[str, Any] = yaml.safe_load(service.config.read_text())
        self._application["args"]["router"]["http_port"] = service.port
        ray.init(address=_address(service), namespace="serve", log_to_driver=False)
        self._client = _get_global_client()

    def close(self) -> None:
        import ray

        ray.shutdown()

    def replicas(self) -> dict[str, set[str]]:
        """Return the ids of the running replicas, by deployment."""
        deployments = self._client.get_serve_details()["applications"][APPLICATION]["deployments"]
        return {
            # Serve knows no deployments while it builds the application again.
            name: {one["replica_id"] for one in deployments.get(name, {"replicas": []})["replicas"] if _runs(one)}
            for name in DEPLOYMENTS
        }

    def runs(self) -> bool:
        """Return whether Serve has completed all changes."""
        return bool(self._client.get_serve_details()["applications"][APPLICATION]["status"] == "RUNNING")

    def change(self, **router: object) -> None:
        """Deploy other `args`: Serve builds the application again and replaces every replica."""
        self._application["args"].setdefault("router", {}).update(router)
        self._deploy()

    def scale(self, replicas: int) -> None:
        """Deploy another number of engines of each role; the others continue."""
        self._application["deployments"] = [{"name": name, "num_replicas": replicas} for name in ENGINES]
        self._deploy()

    @property
    def _application(self) -> dict[str, Any]:
        application: dict[str, Any] = self._config["applications"][0]
        return application

    def _deploy(self) -> None:
        from ray.serve.schema import ServeDeploySchema

        self._client.deploy_apps(ServeDeploySchema.model_validate(self._config))

    async def replaced(self, before: dict[str, set[str]]) -> None:
        """Return once no replica of `before` is left and as many others run."""
        await self._until(lambda now: all(not now[name] & before[name] for name in DEPLOYMENTS), before)

    async def scaled(self, replicas: int) -> None:
        """Return once each role has this number of engines."""
        await self._until(lambda now: all(len(now[name]) == replicas for name in ENGINES), None)

    async def _until(self, condition: Any, as_many_as: dict[str, set[str]] | None) -> None:
        async with asyncio.timeout(PHASE_TIMEOUT_S):
            while True:
                now = await asyncio.to_thread(self.replicas)
                enough = as_many_as is None or all(len(now[name]) >= len(as_many_as[name]) for name in DEPLOYMENTS)
                if enough and condition(now) and await asyncio.to_thread(self.runs):
                    return
                await asyncio.sleep(1)


def _runs(replica: dict[str, Any]) -> bool:
    return bool(replica["state"] == "RUNNING")


def _address(service: ServiceProcess) -> str:
    """Return the address of the service's Ray cluster."""
    for process in service.processes():
        if found := re.search(r"--gcs-address=(\S+)", " ".join(process.cmdline())):
            return found[1]
    raise RuntimeError("the service's Ray cluster cannot be found")


@contextmanager
def service_of_two(folder: Path) -> Iterator[ServiceProcess]:
    """Run two replicas of everything; their log is in `folder`."""
    two = {"replicas": 2, "num_cpus": 0.2}
    config = write_config("local.yaml", folder, prefill=two, decode=two, router={"replicas": 2, "num_cpus": 0.05})
    # A process needs the token of the service's Ray cluster to join it.
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    service = ServiceProcess(config, folder)
    service.start()
    try:
        yield service
    finally:
        service.stop()


async def restart_all(service: ServiceProcess, operator: Operator, times: int) -> list[Load]:
    """Return the phases' loads: before, each restart, scaling down, and scaling up."""
    loads = [Load("before")]
    clients = Clients(service.url, loads[0])
    began = time.monotonic()

    def next_phase(name: str) -> None:
        nonlocal began
        clients.load.seconds = time.monotonic() - began
        print(json.dumps(asdict(clients.load)), flush=True)
        began = time.monotonic()
        clients.load = Load(name)
        loads.append(clients.load)

    print(f"{await clients.learn()} of {QUESTIONS} questions are left out: decode alone errs there", flush=True)
    began = time.monotonic()
    clients.start()
    try:
        await asyncio.sleep(SETTLED_S)
        for turn in range(times):
            next_phase(f"rolling restart {turn + 1}")
            before = await asyncio.to_thread(operator.replicas)
            operator.change(retry_after_s=2 + turn)
            await operator.replaced(before)
            await asyncio.sleep(SETTLED_S)
        for replicas in (1, 2):
            next_phase(f"{replicas} of each role")
            operator.scale(replicas)
            await operator.scaled(replicas)
            await asyncio.sleep(SETTLED_S)
        next_phase("after")
        await asyncio.sleep(SETTLED_S)
    finally:
        await clients.stop()
        next_phase("")
    return loads[:-1]


def main() -> int:
    """Return 1 if a request failed or was answered wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=2, help="how often every replica is replaced")
    parser.add_argument("--folder", type=Path, help="keep the report and the service's log here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service must not outlive this process
    folder = options.folder or Path(tempfile.mkdtemp(prefix="tandem-restart-"))
    folder.mkdir(parents=True, exist_ok=True)
    # Ray's hook for errors must not outlive its cluster: it would wait for it.
    with service_of_two(folder) as service, closing(Operator(service)) as operator:
        loads = asyncio.run(restart_all(service, operator, options.times))
    (folder / "restart.json").write_text(json.dumps([asdict(load) for load in loads], indent=1))
    failed, wrong = (sum(len(getattr(load, name)) for load in loads) for name in ("failed", "wrong"))
    routes: Counter[str] = sum((Counter(load.routes) for load in loads), Counter())
    requests, slowest_s = sum(load.requests for load in loads), max(load.slowest_s for load in loads)
    print(f"{requests} requests: {failed} failed, {wrong} wrong, {dict(routes)}, the slowest took {slowest_s:.1f} s")
    return 1 if failed or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
