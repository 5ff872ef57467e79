"""`make latency-breakdown`: delays a service with real engines, and compares the breakdown's parts.

An engine is stopped (SIGSTOP) for a while at a known moment of a request: then it neither computes
nor moves KV. Prints the medians of every part with and without the delay. Also takes the pictures
of the status page, under load, if a Chromium is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from testing.facts import make_prompt
from testing.service_process import ServiceProcess, write_config
from testing.timing import server_timing

ROUNDS = 7
LONG_FACTS = 230
SHORT_FACTS = 30


@dataclass(frozen=True)
class Delay:
    """Stop of `role`'s engine core, or of its worker, for `stop_s`, from `after_s` after the
    request is sent.

    vLLM's CPU engines have a worker process, which continues to receive KV while the core, the
    scheduler, is stopped.
    """

    name: str
    part: str
    role: str
    after_s: float
    stop_s: float
    facts: int
    worker: bool = False


DELAYS = (
    Delay("prefill's engine stands still when the request comes", "prefill_queue", "Prefill", -0.05, 0.6, SHORT_FACTS),
    # Not in the last chunk: its worker would continue without it, and decode would answer before
    # prefill.
    Delay("prefill's engine stands still while it computes", "prefill", "Prefill", 0.1, 0.6, LONG_FACTS),
    Delay("decode's engine stands still when the request comes", "decode_queue", "Decode", -0.05, 0.9, SHORT_FACTS),
    Delay("decode's scheduler stands still while KV comes", "decode_queue", "Decode", 0.3, 1.5, LONG_FACTS),
    Delay("decode's worker stands still while KV comes", "transfer", "Decode", 0.3, 1.5, LONG_FACTS, worker=True),
)


def engines(service: ServiceProcess) -> dict[str, psutil.Process]:
    """Return each role's engine core."""
    found = {}
    for process in service.processes():
        if "EngineCore" in " ".join(process.cmdline()):
            role = next(role for role in ("Prefill", "Decode") if any(role in _line(one) for one in process.parents()))
            found[role] = process
    return found


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


async def one(client: httpx.AsyncClient, seed: int, facts: int, **more: object) -> dict[str, float]:
    """Return one request's latency breakdown, in milliseconds."""
    prompt = make_prompt(random.Random(f"latency breakdown {seed}"), facts, distance_facts=facts - 1).text
    body = {"model": "tandem-demo", "prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True, **more}
    reply = await client.post("/v1/completions", json=body, headers={"x-tandem-explain": "1"})
    assert reply.status_code == 200, reply.text
    return server_timing(reply)


async def delayed(client: httpx.AsyncClient, process: psutil.Process, delay: Delay, seed: int) -> dict[str, float]:
    # The core's parent is the fork server, and so is its workers'.
    workers = [child for child in process.parent().children(recursive=True) if "Worker" in _line(child)]
    stopped = (workers or [process]) if delay.worker else [process]

    async def stop() -> None:
        await asyncio.sleep(max(delay.after_s, 0))
        for each in stopped:
            os.kill(each.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(delay.stop_s)
        finally:
            for each in stopped:
                os.kill(each.pid, signal.SIGCONT)

    stopping = asyncio.create_task(stop())
    await asyncio.sleep(max(-delay.after_s, 0))
    parts = await one(client, seed, delay.facts)
    await stopping
    return parts


async def measure(service: ServiceProcess) -> list[dict[str, object]]:
    """Return for each delay the medians of every part, with and without, and the error of the
    sums.
    """
    rows: list[dict[str, object]] = []
    processes = engines(service)
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:
        for seed in range(4):
            await one(client, seed, LONG_FACTS)
        seed = 100
        for delay in DELAYS:
            plain, late = [], []
            for _ in range(ROUNDS):
                plain.append(await one(client, seed, delay.facts))
                late.append(await delayed(client, processes[delay.role], delay, seed + 1))
                seed += 2
            off = [abs(sum(parts.values()) - 2 * parts["total"]) for parts in (*plain, *late)]
            rows.append(
                {
                    "delay": delay.name,
                    "part": delay.part,
                    "stopped_ms": 1000 * delay.stop_s,
                    "without_ms": medians(plain),
                    "with_ms": medians(late),
                    "largest_in": sum(_largest(parts) == delay.part for parts in late),
                    "of": ROUNDS,
                    "worst_sum_error_ms": round(max(off), 4),
                }
            )
    return rows


def _largest(parts: dict[str, float]) -> str:
    return max(parts.keys() - {"total"}, key=parts.__getitem__)


def medians(samples: list[dict[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    return {name: round(statistics.median(sample.get(name, 0.0) for sample in samples), 2) for name in names}


async def under_load(service: ServiceProcess, then: Callable[[], None]) -> None:
    """Keep both engines busy with requests of all kinds, and call `then` in a thread meanwhile."""
    done = asyncio.Event()

    async def client(number: int) -> None:
        rng = random.Random(number)
        async with httpx.AsyncClient(base_url=service.url, timeout=120) as http:
            while not done.is_set():
                facts = rng.choice([10, 40, 120, LONG_FACTS])
                more: dict[str, object] = {"max_tokens": rng.choice([8, 40, 160]), "ignore_eos": True}
                if rng.random() < 0.2:
                    more |= {"n": 2, "temperature": 1.0}
                if rng.random() < 0.15:
                    more |= {"stream": False}
                await one(http, rng.randrange(10**6), facts, **more)

    clients = [asyncio.create_task(client(number)) for number in range(8)]
    await asyncio.sleep(12)
    try:
        await asyncio.to_thread(then)
    finally:
        done.set()
        await asyncio.gather(*clients)


def picture(url: str, path: Path, dark: bool, width: int = 1240, height: int = 1900) -> None:
    """Take a screenshot with a real browser, five seconds after it has opened the page."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("tandem: no Chromium is installed, so no pictures")
        return
    with tempfile.TemporaryDirectory() as profile:
        subprocess.run(
            [
                browser,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                f"--blink-settings=preferredColorScheme={0 if dark else 1}",
                f"--window-size={width},{height}",
                "--virtual-time-budget=5000",
                f"--screenshot={path}",
                url,
            ],
            check=True,
            timeout=90,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


@contextmanager
def running(folder: Path) -> Iterator[ServiceProcess]:
    service = ServiceProcess(write_config("local.yaml", folder, router={"replicas": 2}), folder)
    service.start()
    try:
        yield service
    finally:
        service.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/latency_breakdown.json"))
    parser.add_argument("--pictures", type=Path, help="a folder for pictures of the status page")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, running(Path(folder)) as service:
        rows = asyncio.run(measure(service))
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
        for row in rows:
            print(json.dumps(row))
        if given.pictures is not None:
            given.pictures.mkdir(parents=True, exist_ok=True)

            def pictures() -> None:
                for dark in (False, True):
                    path = given.pictures / f"status-{'dark' if dark else 'light'}.png"
                    picture(f"{service.url}/", path, dark)

            asyncio.run(under_load(service, pictures))


if __name__ == "__main__":
    main()
