"""A fuzzing campaign against a running service, which it starts.

    python -m tests.campaigns.fuzz.http --seed 1 --count 4000

No answer may be a 5xx other than the documented 503 and 504, none may be missing, an error must
have OpenAI's form, and no process of the service may grow. The caller checks that the service still
works afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil

from tests.campaigns.fuzz.requests import MODEL, Case, Requests

AT_ONCE = 8
BOUND_S = 60.0
DOCUMENTED = {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
WARM_UP = 0.5
MAX_GROWTH_MIB = 48
OWN_SURFACE = "/v1/"
NO_METHODS = {"BREW", "HEAD"}
"""Statuses of Serve's own proxy, without a body."""

WATCHED = ("Router", "Prefill", "Decode", "EngineCore", "Worker_TP")


@dataclass
class Report:
    """Requests, answers, and findings."""

    cases: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    growth_mib: dict[str, float] = field(default_factory=dict)

    def text(self) -> str:
        cases = ", ".join(f"{number} {name}" for name, number in sorted(self.cases.items()))
        statuses = ", ".join(f"{number} x {status}" for status, number in sorted(self.statuses.items()))
        grown = ", ".join(f"{name} {mib:+.1f}" for name, mib in sorted(self.growth_mib.items()))
        sent = sum(self.cases.values())
        return f"{sent} requests ({cases}); {statuses}; {len(self.findings)} findings; MiB after warm-up: {grown}"


async def attack(
    url: str, seed: int, count: int, processes: list[psutil.Process], bound_s: float, seconds: float = 3600.0
) -> Report:
    """Send ``count`` cases, AT_ONCE at a time.

    ``processes`` are watched for growth. ``bound_s`` is a little more than the service's own
    timeout of a request (``request_timeout_s``). After ``seconds`` no more cases start.
    """
    report = Report()
    cases = Requests(seed)
    began = time.monotonic()
    before = {}
    async with httpx.AsyncClient(base_url=url, timeout=bound_s) as client:
        for part, share in ((0, WARM_UP), (1, 1 - WARM_UP)):
            waiting = iter([cases.case() for _ in range(int(count * share))])

            async def work(waiting=waiting, part=part) -> None:
                for case in waiting:
                    if time.monotonic() - began > seconds * (WARM_UP if part == 0 else 1):
                        return
                    await _send(client, url, case, report, bound_s)

            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
            if part == 0:
                before = memory(processes)
    after = memory(processes)
    for process, mib in after.items():
        name = f"{process[1]} {process[0]}"
        report.growth_mib[name] = mib - before.get(process, mib)
    return report


async def _send(client: httpx.AsyncClient, url: str, case: Case, report: Report, bound_s: float) -> None:
    report.cases[case.name] += 1
    shown = f"{case.name}: {case.method} {case.path[:60]} {case.headers} {(case.raw or case.content)[:600]!r}"
    try:
        if case.raw is not None:
            await asyncio.wait_for(_send_raw(url, case.raw), bound_s)
            return
        async with asyncio.timeout(case.leaves_after_s):
            reply = await client.request(case.method, case.path, content=case.content, headers=case.headers)
    except (httpx.TimeoutException, TimeoutError):
        if case.leaves_after_s is None:
            report.findings.append(f"no answer within {bound_s:g} s to {shown}")
        return
    except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeEncodeError):
        return  # httpx refuses to send the request
    except httpx.TransportError as error:
        # Serve's proxy ends connections whose requests it cannot read.
        if case.name != "headers":
            report.findings.append(f"{error!r} instead of an answer to {shown}")
        return
    report.statuses[reply.status_code] += 1
    if reply.status_code >= 500 and reply.status_code not in DOCUMENTED:
        report.findings.append(f"{reply.status_code} {reply.text[:300]} to {shown}")
    elif reply.status_code >= 400 and case.path.startswith(OWN_SURFACE) and case.method not in NO_METHODS:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            # vLLM's 404 for an endpoint that this model lacks has no error object.
            if reply.json() == {"detail": "Not Found"} or reply.json()["error"]["message"]:
                return
        report.findings.append(f"{reply.status_code} without an error message: {reply.text[:300]!r} to {shown}")


async def _send_raw(url: str, raw: bytes) -> None:
    """Send the case, read for a moment, and disconnect; any answer is right."""
    target = urlsplit(url)
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    with contextlib.suppress(OSError, TimeoutError):
        writer.write(raw)
        await writer.drain()
        async with asyncio.timeout(0.3):
            await reader.read(1000)
    writer.transport.abort()


def memory(processes: list[psutil.Process]) -> dict[tuple[int, str], float]:
    """Return the MiB of routers and engines, by process."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            name = next(
                (name for name in ("Router", "Prefill", "Decode", "EngineCore", "Worker_TP") if name in title), ""
            )
            if name:
                found[process.pid, name] = process.memory_info().rss / 2**20
    return found


def check(report: Report) -> None:
    """Raise AssertionError for a broken rule."""
    assert not report.findings, "\n".join(report.findings[:10])
    grown = {name: mib for name, mib in report.growth_mib.items() if mib > MAX_GROWTH_MIB}
    assert not grown, report.text()


def main() -> None:
    from testing.service_process import ServiceProcess, write_config

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=170, help="send no more cases after this time")
    options = parser.parse_args()
    # The service runs in its own session: a stopped campaign must not leave it behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # Short answers, so that the time is spent on requests rather than tokens.
        limits: dict[str, dict[str, object]] = {
            "engine": {"max_model_len": 512},
            "router": {"request_timeout_s": BOUND_S},
        }
        service = ServiceProcess(write_config("local.yaml", folder, **limits), folder)
        service.start()
        try:
            began = time.monotonic()
            watched, bound_s = service.processes(), BOUND_S + 30
            campaign = attack(service.url, options.seed, options.count, watched, bound_s, options.seconds)
            report = asyncio.run(campaign)
            print(f"HTTP, seed {options.seed}: {report.text()}; {time.monotonic() - began:.0f} s", flush=True)
            for finding in report.findings[:50]:
                print(f"  {finding}", flush=True)
            if report.findings:
                print(service.log[-5000:], flush=True)
            body = {"model": MODEL, "prompt": "mira=427\nkelo=093\ntiba=618\nkelo?", "max_tokens": 3, "temperature": 0}
            reply = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
            answer = reply.json()
            health = httpx.get(f"{service.url}/health").json()
            print(f"afterwards: {answer['choices'][0]['text']!r}, {health}", flush=True)
            check(report)
            assert answer["choices"][0]["text"].strip() == "093"
            assert reply.headers["x-tandem-route"] == "remote"
        finally:
            service.stop()


if __name__ == "__main__":
    main()
