"""Build the service: `app.main:build` for a Serve config file, `app.main:app` for `serve build`.

applications:
  - name: tandem
    import_path: app.main:build
    args: {model: demo}
"""

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from ray import serve
from starlette.types import ASGIApp

from actors.adapter_records import AdapterRecords
from actors.engine.arguments import check_arguments
from actors.engine.engine_actor import Decode, Prefill
from actors.engine_pool.engines import EnginePool
from actors.errors import UnavailableError
from actors.process import link_logs, open_files_of, own_logs, prepare_process
from actors.router.model_router import ModelEngines
from actors.router.peer_routers import RouterReplica, in_replica, own_replica_id
from actors.tls import ReloadedTls, TlsFiles, router_files, rpc_files
from actors.upstream.ray_private import log_directory, on_stop
from app.engine_deployment import DRAIN_POLL_S, SERVE_CALLS, deploy_engine, fallback_secret
from app.http.auth import digests
from app.http.http_server import HttpServer, for_serve_proxies, proxies_refuse
from app.http.record import open_access_log
from app.http.routes import build_http
from app.http.traces import Traces
from configs.settings.auth import environment_keys, environment_operator_keys
from configs.settings.router import RouterSettings
from configs.settings.service import ServiceSettings

logger = logging.getLogger(__name__)

ROUTER_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""Environment variables that make Serve run its part of a router on the router's event loop.

With separate threads, a request took a fifth more CPU time in the router (measured on 2026-11-21,
when requests still passed through Serve).
"""

UNREAD_MARGIN_S = 10.0
"""Time after `router.idle_timeout_s` in which the router, not the kernel, ends such a stream."""


class DeployedModel(NamedTuple):
    """Deployments of one model, which Serve replaces by handles; fields as in `ModelEngines`."""

    prefill: Any
    decode: Any
    names: tuple[str, ...] = ()
    allows_adapters: bool = False
    adapters: tuple[str, ...] = ()
    suffix: str = ""


@serve.ingress()
class HttpRouter(RouterReplica):
    """The router with its HTTP interface: the ingress of the application."""

    _stopping = False
    _http_server: HttpServer | None = None

    # Serve awaits the constructor if it is asynchronous.
    async def __init__(  # type: ignore[misc]
        self,
        settings: RouterSettings,
        models: Sequence[DeployedModel],
        key_digests: tuple[bytes, ...] = (),
        build_key_digests: tuple[bytes, ...] = (),
        operator_digests: tuple[bytes, ...] = (),
        build_operator_digests: tuple[bytes, ...] = (),
        rpc_tls: TlsFiles | None = None,
    ) -> None:
        """Start the router, and its HTTP server if `settings.http_port` is set.

        ``key_digests``        digests of the API keys in `args`
        ``build_key_digests``  digests of the API keys in the environment of the build
        ``operator_digests``, ``build_operator_digests``  the same of operator keys
        ``rpc_tls``            certificate files of the connections to engines; None: no TLS

        Raises ConfigurationError if the port or a certificate cannot be used, OSError if another
        process takes the port during the start, and SettingsError for an invalid API key in this
        process's environment.
        """
        if in_replica():  # not in tests
            link_logs(own_logs(), f"router-{own_replica_id()}")
            self.find_peers()
        prepare_process("Router", open_files_of(settings))
        client = None if rpc_tls is None else ReloadedTls(rpc_tls)
        super().__init__(
            settings.limits(),
            *(
                ModelEngines(
                    EnginePool("prefill", one.prefill, client), EnginePool("decode", one.decode, client), *one[2:]
                )
                for one in models
            ),
            records=_adapter_records(models),
        )
        # Serve may build the application on a node whose environment has no keys, or before the
        # keys changed. So the keys of this process's environment take precedence.
        keys = {*key_digests, *(digests(environment_keys()) or build_key_digests)}
        operators = {*operator_digests, *(digests(environment_operator_keys()) or build_operator_digests)}
        traces = Traces(settings.otlp_traces_endpoint) if settings.otlp_traces_endpoint else None
        log = open_access_log(log_directory(), own_replica_id()) if settings.access_log else None
        surface = build_http(self, sorted(keys), traces, log, settings, sorted(operators))
        self._for_proxies = for_serve_proxies(surface, settings)
        if settings.http_port is not None:
            self._http_server = HttpServer(
                surface,
                settings.http_host,
                settings.http_port,
                settings.leave_s,
                ready=lambda: self.takes_traffic,
                tls=router_files(settings),
                unread_s=settings.idle_timeout_s + UNREAD_MARGIN_S,
                idle_s=settings.keep_alive_timeout_s,
            )
            await self._http_server.open()
        if in_replica():
            on_stop(self.leave)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._for_proxies

    async def check_health(self) -> None:
        """Serve's hook: raise UnavailableError if this replica is stopping.

        After the loss of the Ray head, Serve's new controller adopts all live replicas as running.
        For a stopping one, the error makes the controller stop it again and start another.
        """
        if self._stopping:
            raise UnavailableError("this router is stopping")

    def leave(self) -> None:
        """Prepare to stop: become unready, and keep the engines for requests that still arrive."""
        self._stopping = True
        super().leave()
        if self._http_server is not None:
            self._http_server.leave()

    async def __del__(self) -> None:
        """Serve's hook, after the last request that its proxies have sent to this replica."""
        self._stopping = True
        try:
            if self._http_server is not None:
                await self._http_server.close()
        finally:
            await self.close()


def _adapter_records(models: Sequence[DeployedModel]) -> AdapterRecords | None:
    allowed = in_replica() and any(one.allows_adapters for one in models)
    return AdapterRecords(serve.get_replica_context().app_name) if allowed else None


def build(args: ServiceSettings) -> serve.Application:
    check_arguments(args)
    if args.router.ssl_certfile is not None:
        logger.warning("router.ssl_certfile: %s", proxies_refuse(args.router))
    secret = fallback_secret(args)
    models = [
        DeployedModel(
            deploy_engine(Prefill, "prefill", one, secret, suffix),
            deploy_engine(Decode, "decode", one, secret, suffix),
            one.model_names if args.models else (),
            one.allow_runtime_lora_updating,
            one.adapter_names,
            suffix,
        )
        for suffix, one in args.each_model().items()
    ]
    return router_deployment(args.router).bind(
        args.router,
        models,
        key_digests=digests(args.auth.api_keys),
        build_key_digests=digests(environment_keys()),
        operator_digests=digests(args.auth.operator_keys),
        build_operator_digests=digests(environment_operator_keys()),
        rpc_tls=rpc_files(args),
    )


def router_deployment(settings: RouterSettings) -> serve.Deployment:
    return serve.deployment(
        HttpRouter,
        name="Router",
        num_replicas=settings.replicas,
        ray_actor_options={
            "num_cpus": settings.num_cpus,
            "resources": settings.resources,
            "label_selector": settings.label_selector,
            "runtime_env": {"env_vars": ROUTER_ENVIRONMENT},
        },
        **settings.spreading_options(),
        max_ongoing_requests=SERVE_CALLS,
        graceful_shutdown_timeout_s=settings.drain_s,
        graceful_shutdown_wait_loop_s=DRAIN_POLL_S,
        # Not None: after the removal of a `user_config` from the config file, Serve then calls
        # `reconfigure` with this default, which restores the values of `args`.
        user_config={},
    )


def __getattr__(name: str) -> serve.Application:
    """Return `app`, the service with default settings. Built on demand, for `serve build` only."""
    if name == "app":
        return build(ServiceSettings())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
