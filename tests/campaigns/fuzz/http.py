"""A fuzzing campaign against a running service.

No answer may be a 5xx other than the documented 503 and 504, none may be missing, an error must
have OpenAI's form, and no process of the service may grow.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from tests.campaigns.fuzz.requests import Case, Requests
from tests.campaigns.runner import Report
from tests.campaigns.service.world import BODY, command, leaks, service

AT_ONCE = 8
REQUEST_S = 60.0
BOUND_S = REQUEST_S + 30
"""A little more than the service's own time limit of a request."""

DOCUMENTED = {HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT}
MAX_GROWTH_MIB = 48
OWN_SURFACE = "/v1/"
NO_METHODS = {"BREW", "HEAD"}
"""Statuses of Serve's own proxy, without a body."""

WATCHED = ("Router", "Prefill", "Decode", "EngineCore", "Worker_TP")


class Attack:
    """Hostile clients. Statuses from ``worst`` on are problems, but for the documented ones."""

    def __init__(self, report: Report, url: str, worst: int) -> None:
        self.cases, self.statuses = Counter[str](), Counter[int]()
        self._report, self._url, self._worst = report, url, worst

    async def run(self, cases: Iterable[Case]) -> None:
        """Send all cases, AT_ONCE at a time."""
        waiting = iter(cases)
        async with httpx.AsyncClient(base_url=self._url, timeout=BOUND_S) as client:

            async def work() -> None:
                for case in waiting:
                    await self._send(client, case)

            await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def _send(self, client: httpx.AsyncClient, case: Case) -> None:
        self.cases[case.name] += 1
        shown = f"{case.name}: {case.method} {case.path[:60]} {case.headers} {(case.raw or case.content)[:600]!r}"
        try:
            if case.raw is not None:
                await asyncio.wait_for(self._send_raw(case.raw), BOUND_S)
                return
            async with asyncio.timeout(case.leaves_after_s):
                reply = await client.request(case.method, case.path, content=case.content, headers=case.headers)
        except (httpx.TimeoutException, TimeoutError):
            self._report.check(case.leaves_after_s is not None, f"no answer within {BOUND_S:g} s to {shown}")
            return
        except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeEncodeError):
            return  # httpx refuses to send the request
        except httpx.TransportError as error:
            # Serve's proxy ends connections whose requests it cannot read.
            self._report.check(case.name == "headers", f"{error!r} instead of an answer to {shown}")
            return
        self.statuses[reply.status_code] += 1
        if reply.status_code >= self._worst and reply.status_code not in DOCUMENTED:
            self._report.problem(f"{reply.status_code} {reply.text[:300]} to {shown}")
        elif reply.status_code >= 400 and case.path.startswith(OWN_SURFACE) and case.method not in NO_METHODS:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                # vLLM's 404 for an endpoint that this model lacks has no error object.
                if reply.json() == {"detail": "Not Found"} or reply.json()["error"]["message"]:
                    return
            self._report.problem(f"{reply.status_code} without an error message: {reply.text[:300]!r} to {shown}")

    async def _send_raw(self, raw: bytes) -> None:
        """Send the case, read for a moment, and disconnect; any answer is right."""
        target = urlsplit(self._url)
        reader, writer = await asyncio.open_connection(target.hostname, target.port)
        with contextlib.suppress(OSError, TimeoutError):
            writer.write(raw)
            await writer.drain()
            async with asyncio.timeout(0.3):
                await reader.read(1000)
        writer.transport.abort()


def memory(processes: list[psutil.Process]) -> dict[str, float]:
    """Return the MiB of routers and engines, by process."""
    found = {}
    for process in processes:
        title = command(process)
        if name := next((name for name in WATCHED if name in title), ""):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[f"{name} {process.pid}"] = process.memory_info().rss / 2**20
    return found


def http(report: Report, *, count: int = 4000, seed: int = 1, damage: float = 0.0) -> None:
    """``damage``: 400 is among the statuses that no answer may have."""
    # Short answers, so that the time is spent on requests rather than tokens.
    limits: dict[str, Any] = {"engine": {"max_model_len": 512}, "router": {"request_timeout_s": REQUEST_S}}
    with service(report, **limits) as running:
        watched, requests = running.processes(), Requests(seed)
        attack = Attack(report, running.url, 400 if damage else 500)
        asyncio.run(attack.run(requests.case() for _ in range(count // 2)))
        before = memory(watched)
        asyncio.run(attack.run(requests.case() for _ in range(count - count // 2)))
        growth = {name: mib - before.get(name, mib) for name, mib in memory(watched).items()}
        report.row(cases=attack.cases, statuses=attack.statuses, growth_mib=growth)
        grown = {name: mib for name, mib in growth.items() if mib > MAX_GROWTH_MIB}
        report.check(not grown, f"processes grew by MiB: {grown}")
        reply = httpx.post(f"{running.url}/v1/completions", json=BODY, timeout=60)
        report.equal("an answer afterwards", reply.json()["choices"][0]["text"].strip(), "093")
        report.equal("its route", reply.headers["x-tandem-route"], "remote")
        report.equal("not at baseline", leaks(running.url), {})
