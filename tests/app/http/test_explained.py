"""The breakdown of a request whose prefill answers after decode's first token."""

from __future__ import annotations

from typing import Any

import pytest

from app.http import record
from app.http.auth import digest
from app.http.routes import build_http
from tests.actors.behaviours import counted, request
from tests.actors.fleet import at_rest
from tests.actors.router.test_delays import DELAY_S, Engines
from tests.app.http.test_cancelled_requests import KEY, Client

pytestmark = pytest.mark.usefixtures("virtual_time")


class Asking(Client):
    """Client that asks for an explanation, and records its `Server-Timing`."""

    def __init__(self, stream: bool = True) -> None:
        super().__init__(request(stream=stream))
        self.scope["headers"] = [*self.scope["headers"], (b"x-tandem-explain", b"1")]
        self.timing = ""

    async def send(self, message: dict[str, Any]) -> None:
        self.timing += dict(message.get("headers", ())).get(b"server-timing", b"").decode()
        await super().send(message)


async def ask(engines: Engines, client: Client, **keys: Any) -> dict[str, float]:
    """Return the number of requests with each of these parts in the final records."""
    router: Any = engines.router
    http: Any = build_http(router, **keys)
    await http(client.scope, client.receive, client.send)
    assert (client.status, client.ended) == (200, True)
    await at_rest(engines.prefill, engines.decode)
    name, labels = "tandem_latency_breakdown_seconds_count", {"route": "remote"}
    return {part: counted(router, name, part=part, **labels) for part in ("prefill", "unexplained", "first_step")}


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_asks_is_told_all(stream: bool) -> None:
    """The router delays the first bytes until it has all parts."""
    client = Asking(stream)
    engines = Engines(**{"prefill": 0.05, "prefill's answer": DELAY_S})
    assert await ask(engines, client) == {"prefill": 1, "unexplained": 0, "first_step": 1}
    assert "prefill;" in client.timing
    assert "unexplained" not in client.timing


@pytest.mark.parametrize("keys", ["key_digests", "operator_digests"])
async def test_with_keys_only_an_operator_is_told(keys: str) -> None:
    """The decision tells which prefixes of other clients are cached. The answer is the same."""
    client = Asking()
    await ask(Engines(), client, **{keys: [digest(KEY)]})
    assert bool(client.timing) == (keys == "operator_digests")


async def test_a_client_that_asks_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client receives the parts known so far, and the router records these."""
    monkeypatch.setattr(record, "ACCOUNT_S", 0.01)
    client = Asking()
    assert await ask(Engines(**{"prefill's answer": 60}), client) == {"prefill": 0, "unexplained": 1, "first_step": 1}
    assert "unexplained;" in client.timing


@pytest.mark.parametrize(("late_s", "prefill"), [(0.05, 1), (60, 0)])
async def test_what_is_kept_waits_for_the_end_of_the_answer(late_s: float, prefill: int) -> None:
    """A client without the header waits for nothing; its request is recorded once."""
    engines = Engines(**{"prefill": 0.05, "prefill's answer": late_s, "streaming": DELAY_S})
    found = await ask(engines, Client(request()))
    assert found == {"prefill": prefill, "unexplained": 1 - prefill, "first_step": 1}
