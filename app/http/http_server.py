"""The router's HTTP server, whose requests do not pass through Ray Serve's proxy.

All routers of a service on one node share the port with SO_REUSEPORT: the kernel assigns each new
connection to one of them. So a new router accepts connections before the old one stops. `open`
refuses a port on which another program or service listens.
"""

import asyncio
import errno
import gc
import hashlib
import logging
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from http.client import HTTPException
from typing import cast
from urllib.error import HTTPError

import ray
import uvicorn
from ray import serve
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.rpc.address import LOST_S, enable_keepalive
from actors.tls import TlsFiles, local_opener, server_context
from actors.upstream.uvicorn_protocol import CLIENT_CERTIFICATE, BoundedHttpProtocol
from actors.upstream.uvicorn_server import Server
from app.http.auth import OPEN_PATHS, is_open
from app.http.errors import refusal
from app.http.parsing import OWN_PORT
from configs.settings.router import RouterSettings
from connectors.errors import ConfigurationError

logger = logging.getLogger(__name__)

SERVICE_PATH = "/tandem/service"
"""Path of the service id and readiness. Routers read the id before they share the port; load
balancers read the status: 200 if this router can serve, 503 if it cannot or is stopping."""

BACKLOG = 2048
"""Maximum number of connections in the listener's backlog."""

SETTLES_S = 1.0
"""Seconds for which `open` retries: routers that start or stop may block the port briefly."""

ASK_S = 5.0
"""Timeout in seconds of the request for the service id to the process that has the port."""


CERTIFICATE_NEEDED = refusal(HTTPStatus.FORBIDDEN, "a client certificate is required; connect with one")


class PortTakenError(ConfigurationError):
    """Another program or service listens on the port."""


class HttpServer:
    """HTTP server of one router. `open` it once, `close` it at the end."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        leave_s: float = 1.0,
        service: str | None = None,
        ready: Callable[[], bool] = lambda: True,
        tls: TlsFiles | None = None,
        unread_s: float = LOST_S,
        idle_s: float = 90.0,
    ) -> None:
        """Create the server.

        ``leave_s``   time between `close` and the end of the listener
        ``service``   id of the service; None: the id of this process's Serve application
        ``ready``     returns whether the router can serve requests
        ``tls``       certificate files; None: plain HTTP
        ``unread_s``  time after which the connection of a client that reads nothing, or is lost,
                      ends
        ``idle_s``    time after which a connection without a request ends
        """
        self._app = app
        self._where = (host, port)
        self._leave_s = leave_s
        self._service = service or this_service()
        self._ready = ready
        self._tls = tls
        self._unread_s = unread_s
        self._idle_s = idle_s
        self._leaving: asyncio.Task[None] | None = None
        self._server: Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start to listen.

        Raises PortTakenError, another ConfigurationError if the address or the certificate files
        cannot be used, or OSError if the port was taken after the check.
        """
        tls = None if self._tls is None else server_context(self._tls)
        give_up_at = time.monotonic() + SETTLES_S
        while True:
            try:
                await asyncio.to_thread(self._check_port)
                listener = _bind(*self._where, shared=True)
                break
            except (PortTakenError, OSError):
                if time.monotonic() > give_up_at:
                    raise
            await asyncio.sleep(SETTLES_S / 10)
        enable_keepalive(listener, self._unread_s)  # a connection that ends cancels its request
        config = uvicorn.Config(
            self._handle,
            http=BoundedHttpProtocol,
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=cast(int, self._idle_s),  # uvicorn gives it to `call_later`
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        self._server = Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]), name="http-server")
        gc.collect()
        gc.freeze()  # as vLLM's server: a later collection skips the objects of the start
        logger.info("the router listens on %s:%d", *self._where)

    def leave(self) -> None:
        """Begin to close the server: report 503 at SERVICE_PATH from now on.

        For `leave_s` the server still accepts connections, and responses have `connection: close`,
        so that clients open a new connection, perhaps to another router. Then it closes the
        listener and all connections without a request.
        """
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave(), name="http-server-leaves")

    async def _leave(self) -> None:
        if self._server is not None and self._serving is not None:
            await asyncio.sleep(self._leave_s)
            self._server.should_exit = True
            await self._serving

    async def close(self) -> None:
        """Close the server as `leave` does; return after the last answer has been sent."""
        self.leave()
        assert self._leaving is not None
        await self._leaving

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != SERVICE_PATH:
            scope[OWN_PORT] = True
            allowed = scope["type"] != "http" or self._allows(scope)
            await (self._app if allowed else CERTIFICATE_NEEDED)(scope, receive, self._last(send))
            return
        # For load balancers: 503 while the router is stopping or `ready` returns False.
        status = HTTPStatus.OK if self._ready() and self._leaving is None else HTTPStatus.SERVICE_UNAVAILABLE
        headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": self._service.encode()})

    def _allows(self, scope: Scope) -> bool:
        needed = self._tls is not None and self._tls.ca_certs is not None and not is_open(scope)
        return not needed or scope[CLIENT_CERTIFICATE]

    def _last(self, send: Send) -> Send:
        """Return a `send` that adds `connection: close` to responses of a stopping server."""

        async def tell(message: Message) -> None:
            if self._leaving is not None and message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        return tell

    def _check_port(self) -> None:
        host, port = self._where
        try:
            _bind(host, port, shared=False).close()
            return
        except OSError as error:
            where = f"router.http_host, http_port: {host}:{port}"
            if error.errno != errno.EADDRINUSE:
                raise ConfigurationError(f"{where} cannot be used; choose another host or port: {error}") from error
        try:
            address = f"[{host}]" if ":" in host else host.replace("0.0.0.0", "127.0.0.1")
            scheme = "http" if self._tls is None else "https"
            try:
                reply = local_opener().open(f"{scheme}://{address}:{port}{SERVICE_PATH}", timeout=ASK_S)
            except HTTPError as error:
                reply = error  # a router that is stopping or not ready answers 503 with its service id
            with reply:
                found = reply.read(1000).decode(errors="replace")
        except (OSError, HTTPException) as error:
            raise PortTakenError(f"{where} is in use by another program; choose another port: {error!r}") from error
        if found != self._service:
            raise PortTakenError(f"{where} is in use by another program or service; choose another port")


def for_serve_proxies(app: ASGIApp, settings: RouterSettings) -> ASGIApp:
    """Return `app` as Serve's proxies may use it: with TLS settings, only OPEN_PATHS.

    The router cannot tell whether a proxy's client has used TLS, and Serve requires no client
    certificates, even with its own `ssl_ca_certs`.
    """
    if settings.ssl_certfile is None:
        return app
    refused = refusal(HTTPStatus.FORBIDDEN, proxies_refuse(settings))

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        allowed = scope["type"] != "http" or is_open(scope)
        await (app if allowed else refused)(scope, receive, send)

    return guarded


def proxies_refuse(settings: RouterSettings) -> str:
    needed = "TLS" if settings.ssl_ca_certs is None else "TLS and a client certificate"
    return (
        f"this service requires {needed}, so Ray Serve's proxy answers only {', '.join(sorted(OPEN_PATHS))}; connect "
        f"to the router's port {settings.http_port} (router.http_port) with https"
    )


def this_service() -> str:
    """Return an id of this Serve application on this Ray cluster."""
    context = ray.get_runtime_context()
    application = serve.get_replica_context().app_name
    return hashlib.sha256(f"{context.gcs_address} {application}".encode()).hexdigest()


def _bind(host: str, port: int, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server(
        (host, port), family=family, backlog=BACKLOG, reuse_port=shared, dualstack_ipv6=host == "::"
    )
    listener.setblocking(False)
    return listener
