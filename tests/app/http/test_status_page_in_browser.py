"""The status page in a real browser: what it shows, its key, and its content security policy."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from actors.router.peer_routers import RouterReplica
from actors.telemetry.latency_breakdown import LatencyBreakdown, Span
from actors.telemetry.router_metrics import Pair, RecentRequest
from app.http.auth import digest
from app.http.http_server import HttpServer
from app.http.routes import build_http
from testing import browser
from testing.ports import free_port
from tests.app.http.servers import HOST, LEAVE_S
from tests.app.http.test_status_page import Told

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="Debian's package chromium is not installed")

MARKUP = "<img src=x onerror=\"document.title='run'\">"
"""A request id: foreign text."""


def engine(role: str, replica: str, **more: Any) -> dict[str, Any]:
    numbers = {"running": 3, "waiting": 1, "cache_usage": 0.97, "transfers": {"writing": 2}, "quarantined": 0}
    counts = {"sent_bytes": 5 * 10**6, "recomputed": 0, "pairs": {}, "store_tokens": {}, "store_problems": 0}
    place = {"host": "node-1", "tensor_parallel_size": 2, "data_parallel_size": 1, "model": "tandem-demo"}
    return {"role": role, "replica": replica, "engine_ids": [f"{replica}-id"], **place, **numbers, **counts, **more}


class Busy(Told):
    """A router of a service with one pair of engines and one request."""

    async def status(self) -> dict[str, Any]:
        spans = (Span("router", 0.0, 0.002), Span("prefill", 0.002, 0.080), Span("generation", 0.080, 0.5))
        record = RecentRequest(
            MARKUP, 1.5e9, "/v1/completions", "remote", None, 200, True, Pair("prefill-1", "decode-1"),
            LatencyBreakdown(spans),
        )  # fmt: skip
        counts = dict.fromkeys(("remote", "local", "fallback", "refused", "retries", "resumed_streams"), 0)
        router = {"replica": "router-1", "ongoing": 4, "limit": 64, "rejected_config": None, "counts": counts}
        pairs = {"decode-1-id": (5 * 10**6, 0.01)}
        return {
            "at": 1.5e9,
            "routers": [router | {"counts": counts | {"remote": 7}}],
            "engines": [engine("prefill", "prefill-1", pairs=pairs), engine("decode", "decode-1", quarantined=1)],
            "recent": [record.describe()],
        }


@asynccontextmanager
async def shown(
    folder: Path, keys: Sequence[str] = (), operators: Sequence[str] = ()
) -> AsyncGenerator[browser.Page, None]:
    """Serve the page and open it."""
    port = free_port()
    digests = ([digest(key) for key in some] for some in (keys, operators))
    app = build_http(cast(RouterReplica, Busy()), next(digests), operator_digests=next(digests))
    server = HttpServer(app, HOST, port, LEAVE_S, "ours")
    await server.open()
    try:
        async with browser.opened(f"http://{HOST}:{port}/", folder) as page:
            yield page
    finally:
        await server.close()


def text_of(name: str) -> str:
    return f"document.getElementById('{name}').innerText"


async def test_the_page_shows_the_service(tmp_path: Path) -> None:
    """Replicas, numbers and the request appear; the request's id stays text; nothing is refused."""
    async with shown(tmp_path) as page:
        await page.until(f"{text_of('state')}.startsWith('as of')")
        assert await page.evaluate(text_of("model")) == "tandem-demo"
        assert "7" in await page.evaluate(text_of("numbers"))
        assert "router" in await page.evaluate(text_of("routers"))
        assert "5.0 MB, 500 MB/s while writing" in await page.evaluate(text_of("prefill"))
        assert "in quarantine: the blocks of 1 request" in await page.evaluate(text_of("decode"))
        assert "80 ms" in await page.evaluate(text_of("requests"))
        await page.evaluate("document.querySelector('#requests summary').click()")
        assert MARKUP in await page.evaluate(text_of("requests"))
        assert await page.evaluate("document.title") == "Tandem status"
        assert await page.evaluate("document.querySelectorAll('img').length") == 0
        assert await page.picture("light") != await page.picture("dark")
        assert page.problems == []


async def test_the_page_asks_for_an_operators_key(tmp_path: Path) -> None:
    """Other keys are reported and asked for again; an operator's shows the numbers; Pause stops."""
    told = {"wrong": "this key is not valid", "anna": "this is not an operator's key"}
    async with shown(tmp_path, ["anna"], ["olga"]) as page:
        for key in (*told, "olga"):
            await page.until("!document.getElementById('asks').hidden")
            assert await page.evaluate("document.getElementById('all').hidden")
            await page.evaluate(f"document.getElementById('key').value = '{key}'")
            await page.evaluate("document.querySelector('#asks button').click()")
            if key in told:
                await page.until(f"{text_of('state')} === {json.dumps(told[key])}")
        await page.until("!document.getElementById('all').hidden")
        assert await page.evaluate("document.getElementById('asks').hidden")
        await page.evaluate("document.getElementById('pause').click()")
        assert await page.evaluate(text_of("pause")) == "Resume"
