"""Builds the service: `app.main:build` for a Serve config file, `app.main:app` for `serve build`.

applications:
  - name: tandem
    import_path: app.main:build
    args: {model: demo}
"""

from typing import Any

from pydantic import SecretStr
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from actors.autoscaling.policy import ROLE_POLICY
from actors.engine.arguments import check_arguments, engine_environment
from actors.engine.decode import Decode
from actors.engine.prefill import Prefill
from actors.engine_pool.engines import EnginePool
from actors.engine_pool.serve_discovery import DiscoveryRouter
from actors.router.peer_routers import RouterReplica
from app.cluster_secret import fallback_secret
from app.deployment_options import placed
from app.http.auth import digests
from app.http.http_server import HttpServer
from app.http.routes import build_http
from app.http.traces import Traces
from configs.settings import AuthSettings, RoleName, RouterLimits, RouterSettings, ServiceSettings

ROUTER_SURPLUS_REQUESTS = 64
"""Slots in a router replica beyond its own limit: those requests get a 429 with a reason at once."""

ROUTER_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
"""One event loop for Serve's part of a router and ours, which blocks it for a body's parsing at most: handing each
message from thread to thread cost a fifth of a router's time (`docs/router-cost.md`)."""

HEALTH_CHECK_PERIOD_S = 2.0
"""Serve replaces a replica after three failed checks: a dead engine is out of service in 6 s."""

ENGINE_DRAIN_POLL_S = 0.2
"""Serve waits this long before it looks for requests of its own in a replica that is to stop. Requests do not pass
through Serve (decision 108): the RPC server waits for them. Serve's default of 2 s would only delay every stop."""


@serve.ingress()
class HttpRouter(RouterReplica):
    """The router with its HTTP surface: the ingress of the application."""

    # Serve awaits it.
    async def __init__(  # type: ignore[misc]
        self,
        limits: RouterLimits,
        prefill: DeploymentHandle,
        decode: DeploymentHandle,
        key_digests: tuple[bytes, ...] = (),
        otlp_traces_endpoint: str | None = None,
        listen: tuple[str, int, float] | None = None,
    ) -> None:
        """`listen` is where the router answers clients itself, if it does, and how long it takes leave of them."""
        super().__init__(limits, EnginePool(prefill), EnginePool(decode))
        # Serve builds the application in a task on any node, and keys may be in the environment of routers only.
        traces = Traces(otlp_traces_endpoint) if otlp_traces_endpoint else None
        self._surface = build_http(self, (*key_digests, *digests(AuthSettings().operators_keys())), traces)
        self._front = HttpServer(self._surface, *listen) if listen else None
        if self._front is not None:
            await self._front.open()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve's hook: the ASGI application of this replica."""
        return self._surface

    async def __del__(self) -> None:
        """Serve's hook at the end of a replica's life, when no request from its proxies runs any more."""
        try:
            if (front := getattr(self, "_front", None)) is not None:
                await front.close()
        finally:
            await self.close()


def build(args: ServiceSettings) -> serve.Application:
    """The application for `args`; raises SettingsError naming a key that cannot be used."""
    check_arguments(args)
    secret = fallback_secret(args)
    prefill = deploy_engine(Prefill, "prefill", args, secret)
    decode = deploy_engine(Decode, "decode", args, secret)
    keys = digests(args.auth.operators_keys())
    own = args.router
    listen = None if own.http_port is None else (own.http_host, own.http_port, own.leave_s)
    return router_deployment(args.router).bind(
        args.router.limits(), prefill, decode, keys, args.router.otlp_traces_endpoint, listen
    )


def router_deployment(settings: RouterSettings) -> serve.Deployment:
    """The deployment of the router, to be bound to what `HttpRouter` takes."""
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
        max_replicas_per_node=settings.max_replicas_per_node,
        max_ongoing_requests=settings.max_ongoing_requests + ROUTER_SURPLUS_REQUESTS,
        graceful_shutdown_timeout_s=settings.drain_s,
        user_config=settings.limits().model_dump(),
    )


def deploy_engine(actor: type, role: RoleName, settings: ServiceSettings, secret: SecretStr) -> serve.Application:
    """The deployment of `role` with `actor` as its class, bound to the settings and the secret to fall back to."""
    own = settings.role(role)
    scaling: dict[str, Any] = (
        {"num_replicas": own.replicas}
        if isinstance(own.replicas, int)
        else {"autoscaling_config": {"policy": {"policy_function": ROLE_POLICY}, **own.replicas}}
    )
    deployment = serve.deployment(
        actor,
        name=role.capitalize(),
        max_ongoing_requests=own.max_ongoing_requests,
        request_router_config=RequestRouterConfig(request_router_class=DiscoveryRouter),
        graceful_shutdown_timeout_s=own.drain_s,
        graceful_shutdown_wait_loop_s=ENGINE_DRAIN_POLL_S,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        max_constructor_retry_count=own.start_attempts,
        **placed(own, {"env_vars": engine_environment(settings, role)}),
        **scaling,
    )
    return deployment.bind(settings, secret)


def __getattr__(name: str) -> serve.Application:
    """`app`, the service with default settings: made when asked for, as only `serve build` needs it."""
    if name == "app":
        return build(ServiceSettings())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
