"""Kill ranks of a service with data-parallel engines while it serves requests.

    python -m tests.campaigns.service.data_parallel --help

``make data-parallel`` runs it. Every answer is compared with that of a single engine, which runs
before the service. Each rank must serve a fair share of the requests. Each kill ends the engine
core of one rank while requests run: vLLM then ends the other ranks of the replica, and Serve starts
the replica again. No answer may be wrong, and afterwards the block pools must be empty. With
``--scale``, Serve also adds and removes a prefill replica under load: no request may fail.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from app.http.routes import OPEN_AGE_S
from testing.service_process import ServiceProcess, write_config
from tests.campaigns.faults.campaign import ask_plain_engine
from tests.campaigns.faults.questions import Questions
from tests.campaigns.faults.trials import ANSWER_TOKENS, Question

CONCURRENCY = 8
FEWEST_SHARE = 0.6
"""Fewest requests of a rank, as a fraction of an equal share."""
BACK_TIMEOUT_S = 300.0
EMPTY_TIMEOUT_S = 30.0
SCALED = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 2,
    "look_back_period_s": 2.0,
    "upscale_delay_s": 1.0,
    "downscale_delay_s": 10.0,
}
"""Autoscaling of prefill: eight requests at once need a second replica, one at a time does not."""


@dataclass(frozen=True)
class Asked:
    """Outcomes of requests: right and wrong answers, and error statuses."""

    right: int
    wrong: int
    refused: int


@contextmanager
def service(folder: Path, prefill: int, decode: int, scaled: bool = False) -> Iterator[tuple[ServiceProcess, str]]:
    """Serve the demo model with these data-parallel sizes; yield the service and its URL.

    ``scaled``  whether Serve scales prefill (``SCALED``)
    """
    config = write_config(
        "local.yaml",
        folder,
        prefill={"data_parallel_size": prefill} | ({"replicas": SCALED} if scaled else {}),
        decode={"data_parallel_size": decode},
        # After the loss of a replica, requests wait for the next one instead of failing.
        router={"replica_timeout_s": BACK_TIMEOUT_S, "first_token_timeout_s": BACK_TIMEOUT_S},
    )
    running = ServiceProcess(config, folder)
    running.start()
    try:
        yield running, running.url
    finally:
        running.stop()


async def ask(http: httpx.AsyncClient, question: Question) -> bool | None:
    """Return whether the answer equals the single engine's, or None for an error status.

    Each request has a salt of its own, so no cache has its prompt.
    """
    body = {"model": "tandem-demo", "prompt": question.prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    body |= {"ignore_eos": True, "cache_salt": secrets.token_hex()}
    reply = await http.post("/v1/completions", json=body)
    if reply.status_code != 200:
        print(f"HTTP {reply.status_code}: {reply.text[:200]}", flush=True)
        return None
    choice = reply.json()["choices"][0]
    if choice["text"] != question.expected:
        print(f"wrong: one engine answers {question.expected!r}, not {choice}, {dict(reply.headers)}", flush=True)
        return False
    return True


async def ask_all(url: str, questions: Questions, count: int, seed: int, kill: psutil.Process | None = None) -> Asked:
    """Send ``count`` requests; kill ``kill`` when a third of them has been answered."""
    rng = random.Random(seed)
    asked = [question for _ in range(count) for question in questions.some(rng, 1)]
    outcomes: list[bool | None] = []
    free = asyncio.Semaphore(CONCURRENCY)
    # No idle connections: the server could close one just as the next request is sent on it.
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=2 * BACK_TIMEOUT_S, limits=limits) as http:

        async def one(question: Question) -> None:
            nonlocal kill
            async with free:
                outcomes.append(await ask(http, question))
            if kill is not None and len(outcomes) >= count // 3:
                victim, kill = kill, None
                victim.kill()

        await asyncio.gather(*map(one, asked))
    return Asked(outcomes.count(True), outcomes.count(False), outcomes.count(None))


async def ask_until(url: str, questions: Questions, at_once: int, replicas: int, seed: int) -> tuple[Asked, float]:
    """Send ``at_once`` requests at a time until prefill has ``replicas`` replicas, then 24 more.

    Return the outcomes, and the time until then in seconds; 0 if prefill did not reach it.
    """
    rng = random.Random(seed)
    outcomes: list[bool | None] = []
    began, reached_s, left = time.monotonic(), 0.0, 3 * CONCURRENCY
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=2 * BACK_TIMEOUT_S, limits=limits) as http:

        async def client() -> None:
            nonlocal left
            while left > 0 and time.monotonic() - began < BACK_TIMEOUT_S:
                outcomes.append(await ask(http, questions.some(rng, 1)[0]))
                left -= reached_s > 0

        async def watch() -> None:
            nonlocal reached_s
            while not reached_s and time.monotonic() - began < BACK_TIMEOUT_S:
                await asyncio.sleep(0.5)
                if (await http.get("/health")).json()["replicas"]["prefill"] == replicas:
                    reached_s = time.monotonic() - began

        await asyncio.gather(watch(), *(client() for _ in range(at_once)))
    return Asked(outcomes.count(True), outcomes.count(False), outcomes.count(None)), reached_s


def scale(folder: Path, questions: Questions, prefill: int) -> list[str]:
    """Scale prefill, with ``prefill`` ranks per replica, under load; return the problems."""
    problems = []
    with service(folder, prefill, 1, scaled=True) as (_, url):
        for at_once, replicas in ((CONCURRENCY, 2), (1, 1), (CONCURRENCY, 2), (1, 1)):
            asked, after_s = asyncio.run(ask_until(url, questions, at_once, replicas, seed=replicas))
            print(f"{at_once} at once: {replicas} prefill replicas after {after_s:.0f} s, {asked}", flush=True)
            problems += [f"{replicas} replicas: not reached within {BACK_TIMEOUT_S:g} s"] * (not after_s)
            problems += [f"{replicas} replicas: {asked}"] * (asked.wrong + asked.refused > 0)
        if left := leaks(url):
            problems.append(f"after scaling, not at baseline: {left}")
    return problems


def samples(url: str, name: str) -> dict[tuple[str, str], float]:
    """Return the samples of an engine metric by role and data-parallel rank, each summed."""
    time.sleep(OPEN_AGE_S)  # the router returns a cached response for this time
    found: dict[tuple[str, str], float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        if re.match(rf"{name}\{{", line) and (rank := re.search(r'engine="(\d+)"', line)):
            role = re.search(r'role="(\w+)"', line)
            assert role is not None, line
            key = role[1], rank[1]
            found[key] = found.get(key, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def cores(running: ServiceProcess, role: str) -> dict[str, psutil.Process]:
    """Return the engine cores of a role by process title."""
    found = {}
    for process in running.processes():
        try:
            if f":{role.capitalize()}" in " ".join(process.cmdline()):
                for child in process.children(recursive=True):
                    if title := re.search(r"EngineCore_DP\d+", " ".join(child.cmdline())):
                        found[title[0]] = child
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for_ranks(running: ServiceProcess, sizes: Mapping[str, int]) -> dict[str, dict[str, psutil.Process]]:
    """Return the engine cores by role, once both roles have all of theirs and answer."""
    give_up_at = time.monotonic() + BACK_TIMEOUT_S
    while time.monotonic() < give_up_at:
        found = {role: cores(running, role) for role in sizes}
        replicas = httpx.get(f"{running.url}/health", timeout=30).json().get("replicas", {})
        if all(len(found[role]) == size and replicas.get(role) == 1 for role, size in sizes.items()):
            return found
        time.sleep(1)
    raise RuntimeError(f"the ranks are not back within {BACK_TIMEOUT_S:g} s: {found}")


def leaks(url: str) -> dict[str, dict[tuple[str, str], float]]:
    """Return what is not at its baseline within EMPTY_TIMEOUT_S, by metric."""
    give_up_at = time.monotonic() + EMPTY_TIMEOUT_S
    names = ("vllm:kv_cache_usage_perc", "vllm:tandem_kv_transfers", "vllm:tandem_kv_quarantined")
    while left := {name: found for name in names if any((found := samples(url, name)).values())}:
        if time.monotonic() > give_up_at:
            return left
    return {}


def unfair(served: Mapping[tuple[str, str], float], sizes: Mapping[str, int]) -> list[str]:
    """Return the ranks that served too few requests."""
    problems = []
    for role, size in sizes.items():
        total = sum(count for (one, _), count in served.items() if one == role)
        for rank in range(size):
            count = served.get((role, str(rank)), 0)
            if count < FEWEST_SHARE * total / size:
                problems.append(f"{role} rank {rank} served {count:g} of {total:g} requests")
    return problems


def main() -> int:
    """Return 0 when all answers are right and nothing is left."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--prefill", type=int, default=2, help="data-parallel size of prefill")
    parser.add_argument("--decode", type=int, default=2, help="data-parallel size of decode")
    parser.add_argument("--scale", action="store_true", help="at the end, scale prefill up and down under load")
    parser.add_argument("--folder", type=Path, help="keep the service's log here")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the service must not outlive this process
    sizes = {role: size for role, size in (("prefill", options.prefill), ("decode", options.decode)) if size > 1}
    folder = options.folder or Path(tempfile.mkdtemp(prefix="tandem-dp-"))
    folder.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    questions = asyncio.run(ask_plain_engine(folder))
    with service(folder, options.prefill, options.decode) as (running, url):
        wait_for_ranks(running, sizes)
        before = samples(url, "vllm:request_success_total")
        asked = asyncio.run(ask_all(url, questions, options.requests, seed=1))
        served = {key: count - before.get(key, 0) for key, count in samples(url, "vllm:request_success_total").items()}
        print(f"{asked}, requests by rank {served}", flush=True)
        problems += unfair(served, sizes) if options.requests >= 50 else []
        problems += [f"without a kill: {asked}"] * (asked.right != options.requests)
        for number in range(options.kills):
            role = list(sizes)[number % len(sizes)]
            found = wait_for_ranks(running, sizes)[role]
            title, victim = sorted(found.items())[number // len(sizes) % len(found)]
            others = [process for process in found.values() if process != victim]
            asked = asyncio.run(ask_all(url, questions, 3 * CONCURRENCY, seed=100 + number, kill=victim))
            _, alive = psutil.wait_procs([victim, *others], timeout=60)
            print(f"kill {number + 1}, {role} {title}: {asked}, {len(alive)} of its replica's cores left", flush=True)
            problems += [f"kill {number + 1}: {asked}"] * (asked.right != 3 * CONCURRENCY)
            problems += [f"kill {number + 1}: {alive} are left"] * bool(alive)
        wait_for_ranks(running, sizes)
        if left := leaks(url):
            problems.append(f"not at baseline: {left}")
    if options.scale:
        problems += scale(folder, questions, options.prefill)
    print("\n".join(problems) or "no wrong answer, no leak", flush=True)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
