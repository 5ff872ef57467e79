"""Requests about a stored response reach the decode engine that has it, with their query."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from actors.engine.asgi_call import call_asgi
from actors.errors import RefusedError
from actors.request import Call
from actors.router.model_router import ModelEngines
from actors.router.router import Router
from app.http.errors import error_body
from tests.actors.behaviours import LIMITS, dies, hangs, request, router_of
from tests.actors.fleet import Handle, Replica, at_rest
from tests.app.http.servers import Client, client_of

pytestmark = pytest.mark.usefixtures("virtual_time")

EVENTS = [f"data: {number}\n\n" for number in range(3)]


class Engine:
    """Engine that stores one response, as vLLM does; no other engine has it."""

    def __init__(self, stored: str) -> None:
        self.stored = stored
        self.queries: list[str] = []
        app = Starlette(
            routes=[
                Route("/v1/responses", self.create, methods=["POST"]),
                Route("/v1/responses/{id}", self.retrieve),
                Route("/v1/responses/{id}/cancel", self.cancel, methods=["POST"]),
            ]
        )
        self.app = cast(Any, app)

    def serve(self, call: Call, *_: Any) -> AsyncGenerator[Any, None]:
        return call_asgi(self.app, call, disconnect_s=0.1)

    def found(self, wanted: str | None, **more: Any) -> Response:
        if wanted not in (None, self.stored):
            return JSONResponse(error_body(HTTPStatus.NOT_FOUND, f"no response {wanted}"), 404)
        return JSONResponse({"id": self.stored, **more})

    async def create(self, request: Request) -> Response:
        return self.found((await request.json()).get("previous_response_id"))

    async def retrieve(self, request: Request) -> Response:
        self.queries.append(request.url.query)
        if request.query_params.get("stream") != "true" or request.path_params["id"] != self.stored:
            return self.found(request.path_params["id"])
        return StreamingResponse(
            self.events(int(request.query_params["starting_after"])), media_type="text/event-stream"
        )

    async def events(self, after: int) -> AsyncGenerator[str, None]:
        for event in EVENTS[after + 1 :]:
            yield event
            await asyncio.sleep(0.01)

    async def cancel(self, request: Request) -> Response:
        return self.found(request.path_params["id"], status="cancelled")


def service(*engines: Any, **limits: Any) -> tuple[httpx.AsyncClient, Handle]:
    decode = Handle([Replica(f"d{number}", one) for number, one in enumerate(engines)])
    decode._known = True  # noqa: SLF001 - as after the first request
    return client_of(router_of(LIMITS.model_copy(update=limits), Handle([]), decode)), decode


@pytest.mark.parametrize("wanted", ["a", "b", "c"])
async def test_each_response_is_found(wanted: str) -> None:
    """A response on any of three engines can be retrieved, cancelled and continued."""
    http, decode = service(*(Engine(name).serve for name in "abc"))
    async with http:
        for _ in range(4):  # the router rotates over replicas
            assert (await http.get(f"/v1/responses/{wanted}")).json() == {"id": wanted}
            assert (await http.post(f"/v1/responses/{wanted}/cancel")).json() == {"id": wanted, "status": "cancelled"}
            body = {"input": "and then?", "previous_response_id": wanted}
            assert (await http.post("/v1/responses", json=body)).json() == {"id": wanted}
        await at_rest(decode)


@pytest.mark.parametrize(
    ("first", "wanted", "status"), [("a", "b", 200), ("a", "lost", 404), (dies, "b", 200), (dies, "lost", 503)]
)
async def test_a_response_of_another_model_is_found(first: Any, wanted: str, status: int) -> None:
    """The router asks the models in turn. One that fails may have the response: no 404."""
    serves = (first if first is dies else Engine(first).serve, Engine("b").serve)
    decodes = [Handle([Replica(f"d{number}", serve)]) for number, serve in enumerate(serves)]
    models = []
    for number, decode in enumerate(decodes):
        decode._known = True  # noqa: SLF001 - as after the first request
        decode.prefill = prefill = Handle([])
        prefill.role = "prefill"
        models.append(ModelEngines(cast(Any, prefill), cast(Any, decode), (f"m{number}",), suffix=f"-m{number}"))
    async with client_of(Router(LIMITS, *models)) as http:
        assert (await http.get(f"/v1/responses/{wanted}")).status_code == status
        await at_rest(*decodes)


async def test_a_response_that_nobody_has() -> None:
    """vLLM's own 404, after each engine has been called once."""
    engines = [Engine(name) for name in "abc"]
    http, decode = service(*(one.serve for one in engines))
    async with http:
        reply = await http.get("/v1/responses/lost")
        assert (reply.status_code, reply.json()["error"]["message"]) == (404, "no response lost")
        assert [len(one.queries) for one in engines] == [1, 1, 1]
        body = {"input": "and then?", "previous_response_id": "lost"}
        assert (await http.post("/v1/responses", json=body)).status_code == 404
        assert len(decode.calls) == 6
        await at_rest(decode)


@pytest.mark.parametrize("engines", [("a", dies), (dies, "a")], ids=["at last", "at first"])
async def test_a_response_to_continue_may_be_in_the_engine_that_died(engines: tuple[Any, Any]) -> None:
    """The answer is 503, not 404, if the engines that answer do not have it."""
    http, decode = service(*(one if one is dies else Engine(one).serve for one in reversed(engines)))
    decode.in_order = True
    async with http:
        body = {"input": "and then?", "previous_response_id": "a"}
        assert (await http.post("/v1/responses", json=body)).json() == {"id": "a"}
        body = {"input": "and then?", "previous_response_id": "lost"}
        assert (await http.post("/v1/responses", json=body)).status_code == 503
        await at_rest(decode)


def full(times: int, serve: Any = None) -> Any:
    """Return an engine whose slots are all taken for its first calls."""

    async def refuses(call: Call, turn: int) -> AsyncGenerator[Any, None]:
        if turn <= times:
            await asyncio.sleep(0.01)
            raise RefusedError("full")
        async for item in serve(call, turn):
            yield item

    return refuses


@pytest.mark.parametrize(
    ("other", "timeout_s", "status"),
    [(dies, 60.0, 503), (full(10**6), 0.5, 503), (hangs, 1.0, 504)],
    ids=["dies", "full", "slow"],
)
async def test_an_engine_that_does_not_answer_hides_no_response(other: Any, timeout_s: float, status: int) -> None:
    """The router calls the other engines. A missing response is no 404: this engine may have it."""
    http, decode = service(Engine("a").serve, other, replica_timeout_s=timeout_s)
    async with http:
        for _ in range(4):
            assert (await http.get("/v1/responses/a")).json() == {"id": "a"}
        reply = await http.get("/v1/responses/lost")
        assert (reply.status_code, reply.headers.get("retry-after")) == (status, "1" if status == 503 else None)
        await at_rest(decode)


@pytest.mark.parametrize("others", [0, 2])
async def test_a_full_engine_is_waited_for(others: int) -> None:
    """The router calls the other engines first, then waits up to `replica_timeout_s` for the full
    one.
    """
    http, decode = service(full(5, Engine("a").serve), *(Engine("b").serve for _ in range(others)))
    async with http:
        assert (await http.get("/v1/responses/a")).json() == {"id": "a"}
        assert len(decode.replicas[0].calls) == 6
        assert all(len(one.calls) <= 1 for one in decode.replicas[1:])
        await at_rest(decode)


async def test_the_query_arrives_and_events_are_relayed() -> None:
    """The router relays vLLM's events from the one after the event that the client names."""
    engines = [Engine(name) for name in "ab"]
    http, decode = service(*(one.serve for one in engines))
    async with http:
        for _ in range(2):
            reply = await http.get("/v1/responses/b?stream=true&starting_after=0")
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert reply.text == "".join(EVENTS[1:])
        assert set(engines[1].queries) == {"stream=true&starting_after=0"}
        await at_rest(decode)


async def test_an_escaped_path_stays_a_path() -> None:
    """A question mark in an id does not start a query."""
    engine = Engine("what?now")
    http, decode = service(engine.serve)
    async with http:
        assert (await http.get("/v1/responses/what%3Fnow?x=1")).json() == {"id": "what?now"}
        assert engine.queries == ["x=1"]
        await at_rest(decode)


async def test_a_client_that_leaves_a_stored_stream_ends_it() -> None:
    """No slot and no call is left."""
    engine = Engine("a")

    async def endless(after: int) -> AsyncGenerator[str, None]:
        while True:
            yield "data: more\n\n"
            await asyncio.sleep(0.01)

    engine.events = endless  # type: ignore[method-assign]
    decode = Handle([Replica("d", engine.serve)])
    router, client = router_of(LIMITS, Handle([]), decode), Client(request())
    client.scope |= {"method": "GET", "path": "/v1/responses/a", "query_string": b"stream=true&starting_after=0"}
    serving = client.serve(router)
    await asyncio.sleep(0.2)
    assert (client.status, serving.done()) == (200, False)
    client.left.set()
    await asyncio.wait_for(serving, 20)
    await at_rest(decode)
