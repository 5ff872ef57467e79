"""The status page loads nothing from other origins, and knows every part of a latency breakdown."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from actors.telemetry.latency_breakdown import PARTS
from actors.telemetry.router_metrics import RouterMetrics
from app.http.auth import digest
from app.http.status_page import PAGE_HEADERS, status_page
from configs.settings.router import RouterLimits
from tests.app.http.servers import client_of


class Told:
    """A router with this status of the service."""

    limits = RouterLimits()
    models = ()

    def __init__(self) -> None:
        self.metrics = RouterMetrics()

    def max_requests_of_key(self, keys: int) -> None:
        """Set no limit."""

    async def status(self) -> dict[str, Any]:
        return {"at": 1.5, "routers": [], "engines": [], "recent": []}


def client(*keys: str, operators: Sequence[str] = ()) -> httpx.AsyncClient:
    digests = [[digest(key) for key in some] for some in (keys, operators)]
    return client_of(Told(), digests[0], operator_digests=digests[1])


def test_the_page_is_alone_and_safe() -> None:
    """It has no address of another host and no second file; clients choose request ids, which it
    must not show as markup.
    """
    page = status_page()
    assert not re.search(r"https?://|@import|url\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write", page)
    assert re.findall(r'\b(?:src|href)="([^"]*)"', page) == ["data:,"]


@pytest.mark.parametrize(("tag", "directive"), [("script", "script-src"), ("style", "style-src")])
def test_only_what_stands_in_the_page_may_run(tag: str, directive: str) -> None:
    """The policy has the hash of the script's exact text, and no attribute needs another source."""
    (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", status_page(), re.DOTALL)
    found = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
    assert f"{directive} 'sha256-{found}';" in PAGE_HEADERS["Content-Security-Policy"]
    assert not re.search(r"<[^>]+\s(?:style|on\w+)=", status_page())


def test_every_part_has_a_name_and_two_colours() -> None:
    """One colour for a light and one for a dark page; a colour for both occurs once."""
    page = status_page()
    (names,) = re.findall(r"const PARTS = \{(.*?)\};", page, re.DOTALL)
    assert tuple(re.findall(r"(\w+): \"", names)) == PARTS
    for part in PARTS:
        assert len(re.findall(rf"--{part}: #\w+;", page)) in (1, 2), part


async def test_the_page_is_open_and_what_it_shows_is_not() -> None:
    """With keys, only an operator can read the numbers and the ids of all clients' requests."""
    async with client("anna", operators=["otto"]) as http:
        page = await http.get("/")
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        assert page.text == status_page()
        assert page.headers["content-security-policy"] == PAGE_HEADERS["Content-Security-Policy"]
        assert (await http.get("/tandem/status")).status_code == 401
        refused = await http.get("/tandem/status", headers={"Authorization": "Bearer anna"})
        assert (refused.status_code, refused.json()["error"]["type"]) == (403, "Forbidden")
        told = await http.get("/tandem/status", headers={"Authorization": "Bearer otto"})
        assert json.loads(told.text)["at"] == 1.5
        assert told.headers["cache-control"] == "no-store"
