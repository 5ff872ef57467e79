"""A fuzzing campaign against a running service.

No answer may be a 5xx other than the documented 503 and 504, none may be missing, an error must
have OpenAI's form, and no process of the service may grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from tests.campaigns.fuzz.requests import Case, Requests
from tests.campaigns.runner import Report
from tests.campaigns.service.world import BODY, command, leaks, service

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
class Found:
    """Requests, answers, and findings."""

    cases: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    growth_mib: dict[str, float] = field(default_factory=dict)


async def attack(
    url: str,
    seed: int,
    count: int,
    processes: list[psutil.Process],
    bound_s: float,
    seconds: float = 3600.0,
    worst: int = 500,
) -> Found:
    """Send ``count`` cases, AT_ONCE at a time.

    ``processes`` are watched for growth. ``bound_s`` is a little more than the service's own
    timeout of a request (``request_timeout_s``). After ``seconds`` no more cases start. Statuses
    from ``worst`` on are findings, but for the documented ones.
    """
    found = Found()
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
                    await _send(client, url, case, found, bound_s, worst)

            await asyncio.gather(*(work() for _ in range(AT_ONCE)))
            if part == 0:
                before = memory(processes)
    after = memory(processes)
    for process, mib in after.items():
        name = f"{process[1]} {process[0]}"
        found.growth_mib[name] = mib - before.get(process, mib)
    return found


async def _send(client: httpx.AsyncClient, url: str, case: Case, found: Found, bound_s: float, worst: int) -> None:
    found.cases[case.name] += 1
    shown = f"{case.name}: {case.method} {case.path[:60]} {case.headers} {(case.raw or case.content)[:600]!r}"
    try:
        if case.raw is not None:
            await asyncio.wait_for(_send_raw(url, case.raw), bound_s)
            return
        async with asyncio.timeout(case.leaves_after_s):
            reply = await client.request(case.method, case.path, content=case.content, headers=case.headers)
    except (httpx.TimeoutException, TimeoutError):
        if case.leaves_after_s is None:
            found.findings.append(f"no answer within {bound_s:g} s to {shown}")
        return
    except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeEncodeError):
        return  # httpx refuses to send the request
    except httpx.TransportError as error:
        # Serve's proxy ends connections whose requests it cannot read.
        if case.name != "headers":
            found.findings.append(f"{error!r} instead of an answer to {shown}")
        return
    found.statuses[reply.status_code] += 1
    if reply.status_code >= worst and reply.status_code not in DOCUMENTED:
        found.findings.append(f"{reply.status_code} {reply.text[:300]} to {shown}")
    elif reply.status_code >= 400 and case.path.startswith(OWN_SURFACE) and case.method not in NO_METHODS:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            # vLLM's 404 for an endpoint that this model lacks has no error object.
            if reply.json() == {"detail": "Not Found"} or reply.json()["error"]["message"]:
                return
        found.findings.append(f"{reply.status_code} without an error message: {reply.text[:300]!r} to {shown}")


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
        title = command(process)
        if name := next((name for name in WATCHED if name in title), ""):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[process.pid, name] = process.memory_info().rss / 2**20
    return found


def check(found: Found) -> None:
    """Raise AssertionError for a broken rule."""
    assert not found.findings, "\n".join(found.findings[:10])
    grown = {name: mib for name, mib in found.growth_mib.items() if mib > MAX_GROWTH_MIB}
    assert not grown, grown


def http(report: Report, *, count: int = 4000, seed: int = 1, minutes: float = 60.0, damage: float = 0.0) -> None:
    """``damage``: 400 is among the statuses that no answer may have."""
    # Short answers, so that the time is spent on requests rather than tokens.
    limits: dict[str, Any] = {"engine": {"max_model_len": 512}, "router": {"request_timeout_s": BOUND_S}}
    with service(report, **limits) as running:
        watched = running.processes()
        worst = 400 if damage else 500
        found = asyncio.run(attack(running.url, seed, count, watched, BOUND_S + 30, 60 * minutes, worst))
        report.row(cases=found.cases, statuses=found.statuses, growth_mib=found.growth_mib)
        for finding in found.findings:
            report.problem(finding)
        if not found.findings:
            check(found)
        reply = httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=60)
        report.equal("an answer afterwards", reply.json()["choices"][0]["text"].strip(), "093")
        report.equal("its route", reply.headers["x-tandem-route"], "remote")
        report.equal("not at baseline", leaks(running.url), {})
