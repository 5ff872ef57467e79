"""Web pages of other origins (CORS)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from app.http.auth import digest
from configs.settings.router import RouterSettings
from tests.actors.behaviours import engine, fleet, well
from tests.app.http.servers import client_of

ORIGIN = "https://chat.example"
ASKS = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, content-type"}


def client(**settings: Any) -> httpx.AsyncClient:
    router, *_ = fleet([well], [engine(1, [1])])
    return client_of(router, [digest("key")], settings=RouterSettings(**settings))


async def test_allowed_origins() -> None:
    """Browsers ask without the key; the answer to a request names the origin, also a refusal."""
    async with client(allowed_origins=[ORIGIN]) as http:
        asked = await http.options("/v1/completions", headers={"Origin": ORIGIN, **ASKS})
        assert asked.status_code == 200
        assert asked.headers["access-control-allow-origin"] == ORIGIN
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == "authorization, content-type"
        for key, status in (("key", 200), ("another", 401)):
            headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
            reply = await http.post("/v1/completions", json={"prompt": "a", "stream": True}, headers=headers)
            assert (reply.status_code, reply.headers["access-control-allow-origin"]) == (status, ORIGIN)


@pytest.mark.parametrize(
    ("settings", "asks", "credentials"),
    [
        ({}, ASKS, None),
        ({"allowed_origins": [ORIGIN]}, ASKS, None),
        (
            {"allowed_origins": ["*"], "allowed_methods": ["GET"], "allow_credentials": True},
            {"Access-Control-Request-Method": "PUT"},
            "true",
        ),
    ],
)
async def test_refused_pages(settings: dict[str, Any], asks: dict[str, str], credentials: str | None) -> None:
    """Browsers do not give an answer to a page whose origin it does not name."""
    origin = {"Origin": "https://other.example", "Authorization": "Bearer key"}
    async with client(**settings) as http:
        assert (await http.options("/v1/completions", headers=origin | asks)).status_code >= 400
        reply = await http.get("/health", headers=origin)
        assert ("access-control-allow-origin" in reply.headers) == (credentials is not None)
        assert reply.headers.get("access-control-allow-credentials") == credentials
