"""Build the router's ASGI application: vLLM's routes, `/health`, `/metrics`, the status page."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from actors.request import Endpoint
from actors.router.peer_routers import RouterReplica
from actors.router.single_flight import SingleFlight
from app.http.auth import OPERATOR, OPERATOR_NEEDED, Authenticated
from app.http.errors import BadRequestError, error_response, refusal
from app.http.forwarded.from_decode import FromDecode
from app.http.forwarded.models import AdapterEndpoints, ModelList
from app.http.generate import Generate
from app.http.merge_metrics import CONTENT_TYPE, merge
from app.http.parsing import path_of
from app.http.record import AccessLog
from app.http.status_page import PAGE_HEADERS, status_page
from app.http.traces import Traces
from configs.settings.router import RouterSettings
from connectors.errors import TandemError

logger = logging.getLogger(__name__)

OPEN_AGE_S = 1.0
"""Maximum age in seconds of an answer of `/metrics`.

Limits the load on engines, because `/metrics` needs no API key.
"""

FROM_DECODE = ("/v1/models", "/version", "/tokenizer_info", "/v1/responses/{id}")
"""Paths of GET requests that a decode engine answers.

With several models, `ModelList` answers `/v1/models`.
"""


def build_http(
    router: RouterReplica,
    key_digests: Sequence[bytes] = (),
    traces: Traces | None = None,
    access_log: Callable[[str], None] | None = None,
    settings: RouterSettings | None = None,
    operator_digests: Sequence[bytes] = (),
) -> ASGIApp:
    """Return the application of `router`.

    ``key_digests``  digests of valid API keys. All requests are admitted if there are neither these
                     nor `operator_digests`
    ``traces``       creates the spans of requests; None: no spans
    ``access_log``   receives one line per request, except for UNLOGGED_PATHS (probes, scrapers and
                     the status page); None: no access log
    ``settings``     settings for CORS and for requests in the access log; None: the defaults

    ``operator_digests``  digests of valid keys of operators
    """

    async def merged() -> str:
        routers, engines = await asyncio.gather(router.router_metrics(), router.engine_metrics())
        return merge([*(("router", replica, text) for replica, text in routers), *engines])

    exposition = SingleFlight(merged, OPEN_AGE_S)

    async def health(_: Request) -> Response:
        replicas, reason = router.replicas(), router.degraded
        told = "unavailable" if not router.ready else "degraded" if reason else "ok"
        status = HTTPStatus.OK if router.ready else HTTPStatus.SERVICE_UNAVAILABLE
        answer: dict[str, Any] = {"status": told, "replicas": replicas}
        if told == "degraded":
            answer["reason"] = reason
        if len(router.models) > 1:
            answer["models"] = {model.names[0]: model.replicas() for model in router.models}
        return JSONResponse(answer, status_code=status)

    async def load(_: Request) -> Response:
        return JSONResponse({"server_load": router.ongoing})

    async def metrics(_: Request) -> Response:
        return Response(await exposition(), media_type=CONTENT_TYPE)

    async def status(request: Request) -> Response:
        if not request.scope.get(OPERATOR, True):
            return refusal(HTTPStatus.FORBIDDEN, OPERATOR_NEEDED)
        return JSONResponse(await router.status(), headers={"Cache-Control": "no-store"})

    async def drain(request: Request) -> Response:
        if not request.scope.get(OPERATOR, True):
            return refusal(HTTPStatus.FORBIDDEN, OPERATOR_NEEDED)
        try:
            on = {"POST": True, "DELETE": False}.get(request.method)
            return JSONResponse(await router.drain(request.path_params["engine"], on))
        except TandemError as error:
            return error_response(error, router.limits.retry_after_s)

    async def page(_: Request) -> Response:
        return HTMLResponse(status_page(), headers=PAGE_HEADERS)

    async def refuse(_: Request, error: Exception) -> Response:
        return error_response(error, router.limits.retry_after_s)

    from_decode = FromDecode(router)
    generate: dict[str, ASGIApp] = {path: Generate(router, path, traces) for path in get_args(Endpoint)}
    others = Starlette(
        routes=[
            *(Route(path, app, methods=["POST"]) for path, app in generate.items()),
            *_models_routes(router),
            *(Route(path, from_decode, methods=["GET"]) for path in FROM_DECODE),
            Route("/v1/responses/{id}/cancel", from_decode, methods=["POST"]),
            Route("/health", health, methods=["GET"]),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/load", load, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
            Route("/", page, methods=["GET"]),
            Route("/tandem/status", status, methods=["GET"]),
            Route("/tandem/drain/{engine}", drain, methods=["GET", "POST", "DELETE"]),
        ],
        exception_handlers={HTTPException: refuse_route, BadRequestError: refuse},
    )

    async def surface(scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's layers would take as long as a routing decision.
        found = generate.get(path_of(scope)) if scope.get("method") == "POST" else None
        await (found or others)(scope, receive, send)

    own = settings or RouterSettings()
    app: ASGIApp = surface
    if key_digests or operator_digests:
        app = Authenticated(app, router, key_digests, operator_digests)
    if own.allowed_origins:
        app = CORSMiddleware(  # outside `Authenticated`: browsers send preflights without a key
            app,
            allow_origins=own.allowed_origins,
            allow_methods=own.allowed_methods,
            allow_headers=own.allowed_headers,
            allow_credentials=own.allow_credentials,
        )
    return app if access_log is None else AccessLog(app, access_log, own.request_log)


def _models_routes(router: RouterReplica) -> list[Route]:
    routes = []
    if len(router.models) > 1:
        routes.append(Route("/v1/models", ModelList(router).endpoint, methods=["GET"]))
    if any(model.allows_adapters for model in router.models):
        adapters = AdapterEndpoints(router)
        routes.append(Route("/v1/load_lora_adapter", adapters.load, methods=["POST"]))
        routes.append(Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"]))
    return routes


async def refuse_route(request: Request, error: Exception) -> Response:
    """Return Starlette's errors (unknown path, wrong method) in OpenAI's format."""
    if not isinstance(error, HTTPException):
        raise error
    status = HTTPStatus(error.status_code)
    return refusal(status, f"{request.method} {request.url.path}: {status.phrase.lower()}", error.headers)
