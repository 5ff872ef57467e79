"""A running service, and clients with questions of known answer: the world of `service`.

The campaigns use what clients and operators can: HTTP, /metrics, /tandem/status and process ids.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from testing.facts import RecallPrompt, exact, make_prompt
from testing.service_process import ServiceProcess, write_config
from testing.sse import said
from tests.campaigns.runner import Report, misquoted

MODEL = "tandem-demo"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "mira=427\nkelo=093\nkelo?", "max_tokens": 3, "temperature": 0}
FRESH_S = 1.2
"""Longer than the router repeats an answer of /metrics or /tandem/status."""

REQUEST_S = 300.0
BASELINE_S = 60.0
AT_BASELINE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:tandem_kv_transfers",
    "vllm:tandem_kv_quarantined",
)
"""Metrics that are zero on an idle service."""


@contextmanager
def service(report: Report, config: Path | str = "local.yaml", **sections: Any) -> Iterator[ServiceProcess]:
    """Serve a shipped configuration with changed sections; at the end no process may be left."""
    path = config if isinstance(config, Path) else write_config(config, report.folder, **sections)
    running = ServiceProcess(path, report.folder)
    running.start()
    try:
        yield running
    finally:
        left = running.stop()
        report.check(not left, f"processes outlive the service: {left}")


# ---- what operators see -------------------------------------------------------------------------


def exposition(url: str) -> list[Sample]:
    """Return all current samples of /metrics."""
    time.sleep(FRESH_S)
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def total(url: str, name: str, **labels: str) -> float:
    """Return the sum of the current samples of a metric with these labels."""
    return sum(one.value for one in exposition(url) if one.name == name and labels.items() <= one.labels.items())


def leaks(url: str, within_s: float = BASELINE_S) -> dict[str, float]:
    """Return the samples of engines that do not return to zero in time."""
    give_up_at = time.monotonic() + within_s
    while left := {
        f"{one.name} {one.labels}": one.value for one in exposition(url) if one.name in AT_BASELINE and one.value
    }:
        if time.monotonic() > give_up_at:
            return left
    return {}


def status(url: str) -> dict[str, Any]:
    """Return the JSON behind the status page."""
    time.sleep(FRESH_S)
    found: dict[str, Any] = httpx.get(f"{url}/tandem/status", timeout=30).raise_for_status().json()
    return found


@dataclass(frozen=True)
class EngineProcess:
    """An engine's actor and its core; with data parallelism, one entry per rank."""

    actor: psutil.Process
    core: psutil.Process

    @property
    def title(self) -> str:
        return " ".join(self.core.cmdline())

    @property
    def computing(self) -> list[psutil.Process]:
        """The core and its workers: the fork server is the parent of both."""
        return [self.core, *(one for one in self.actor.children(recursive=True) if "Worker" in command(one))]

    @property
    def busy_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self.computing)


def command(process: psutil.Process) -> str:
    """Return the command line of a process, or nothing if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def engine_processes(family: list[psutil.Process], role: str) -> list[EngineProcess]:
    """Return the engines of a role (``Prefill`` or ``Decode``, with a model's name if several)."""
    found = []
    for actor in family:
        if f":{role}" in command(actor):
            with suppress(psutil.NoSuchProcess):
                cores = [one for one in actor.children(recursive=True) if "EngineCore" in command(one)]
                found += [EngineProcess(actor, core) for core in cores]
    return found


def until(done: Callable[[], Any], what: str, within_s: float = REQUEST_S) -> Any:
    """Return the first true value of ``done``. Raises TimeoutError with ``what``."""
    give_up_at = time.monotonic() + within_s
    while True:
        with suppress(httpx.HTTPError, OSError, KeyError, ValueError):  # not yet
            if found := done():
                return found
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        time.sleep(0.5)


# ---- clients ------------------------------------------------------------------------------------


@dataclass
class Load:
    """Outcomes of the requests of one phase."""

    phase: str
    requests: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    routes: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    @property
    def right(self) -> int:
        return sum(self.routes.values()) - len(self.wrong)


@dataclass
class Clients:
    """Clients that send one question after the other: completions and chats, streamed or not.

    ``damage``   share of the answers that are expected to be other ones
    ``pause_s``  between two requests: engines may start on the same cores
    ``streams``  whether every second request is streamed
    ``may_be_refused``  whether an error breaks no promise
    ``explain``  whether to record the reason why decode computed a prompt, as its route
    ``timeline``  time in seconds and route of each answer
    """

    url: str
    damage: float = 0.0
    at_once: int = 4
    pause_s: float = 0.25
    streams: bool = True
    facts: tuple[int, ...] = (4, 20, 60, 120)
    may_be_refused: bool = False
    explain: bool = False
    timeline: list[tuple[float, str]] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    _questions: list[tuple[RecallPrompt, bool, str]] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _asked: int = 0
    _began: float = field(default_factory=time.monotonic)

    @property
    def load(self) -> Load:
        return self.loads[-1]

    async def learn(self, count: int = 40) -> None:
        """Keep the questions that decode alone answers right: no transferred KV is involved."""
        dice = random.Random("damage")
        async with self._http() as http:
            for number in range(count):
                rng = random.Random(f"clients {number}")
                facts = rng.choice(self.facts)
                prompt, chat = make_prompt(rng, facts, distance_facts=facts - 1), number % 2 == 1
                route, text = await ask(http, prompt, chat, stream=False, prompt_logprobs=0)
                assert route == "local", route
                if exact(prompt, text):
                    self._questions.append((prompt, chat, misquoted(text, self.damage, dice)))
        assert len(self._questions) > count // 4, f"decode alone answers {len(self._questions)} of {count}"

    def next_phase(self, report: Report, phase: str = "") -> Load:
        """Report the phase that ends, and begin another one; return its load."""
        if self.loads:
            report.row(**vars(self.load) | {"failed": len(self.load.failed), "wrong": len(self.load.wrong)})
        self.loads.append(Load(phase))
        return self.load

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self.at_once)]

    async def stop(self) -> None:
        """Stop each client after its current answer."""
        tasks, self._tasks = self._tasks, []
        await asyncio.gather(*tasks)

    async def answered(self, more: int) -> None:
        """Return once this number of further requests has been answered."""
        wanted = sum(load.requests for load in self.loads) + more
        async with asyncio.timeout(REQUEST_S):
            while sum(load.requests for load in self.loads) < wanted:  # noqa: ASYNC110 - they have no event
                await asyncio.sleep(0.1)

    def judge(self, report: Report) -> None:
        for load in self.loads:
            for one in (*(() if self.may_be_refused else load.failed[:5]), *load.wrong[:5]):
                report.problem(f"{load.phase}: {one}")

    def _http(self, explain: bool = False) -> httpx.AsyncClient:
        headers = {"x-tandem-explain": "1"} if explain else {}
        # No idle connections: a server could close one just as the next request is sent on it.
        limits = httpx.Limits(max_keepalive_connections=0)
        return httpx.AsyncClient(base_url=self.url, timeout=REQUEST_S, limits=limits, headers=headers)

    async def _client(self) -> None:
        me = asyncio.current_task()
        async with self._http(self.explain) as http:
            while me in self._tasks:
                self._asked += 1
                await self._one(http, self._asked)
                await asyncio.sleep(self.pause_s)

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        prompt, chat, expected = self._questions[number // 2 % len(self._questions)]
        began, load = time.monotonic(), self.load
        try:
            salt = {"cache_salt": secrets.token_hex()}
            route, text = await ask(http, prompt, chat, self.streams and number % 2 == 1, **salt)
        except (httpx.HTTPError, AssertionError, KeyError, ValueError) as error:
            load.failed.append(f"request {number}: {type(error).__name__}: {str(error)[:300]}")
            return
        finally:
            load.requests += 1
            load.slowest_s = max(load.slowest_s, round(time.monotonic() - began, 2))
        load.routes[route] += 1
        self.timeline.append((round(time.monotonic() - self._began, 1), route))
        if text != expected:
            load.wrong.append(f"request {number}: {text!r} where {expected!r} is right")


async def ask(
    http: httpx.AsyncClient, prompt: RecallPrompt, chat: bool, stream: bool, **more: object
) -> tuple[str, str]:
    """Return the request's route and its text. Raises AssertionError for another status."""
    asked: Mapping[str, Any] = {"messages": prompt.messages} if chat else {"prompt": prompt.text}
    body = {"model": MODEL, "temperature": 0, "max_tokens": 12, "stream": stream, **asked, **more}
    reply = await http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert reply.status_code == 200, f"HTTP {reply.status_code}: {reply.text}"
    choice = said(reply.content) if stream else reply.json()["choices"][0]
    text = choice["text"] if not chat else choice["delta"]["content"] if stream else choice["message"]["content"]
    # The headers of a stream that waits long for its first token are sent before its route.
    route = reply.headers.get("x-tandem-route", "no route yet")
    if "x-tandem-explain" in http.headers:
        if route == "local":
            route = f"recomputed: {reply.headers['x-tandem-local-reason']}"
        elif "recompute" in reply.headers["server-timing"]:
            route = "recomputed: transfer"
    return route, str(text)
