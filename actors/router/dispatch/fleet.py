"""Engines and routing state that all requests of a router share."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors.engine_pool.engines import EnginePool, Slot
from actors.router.routing_feedback import RoutingFeedback
from actors.telemetry.router_metrics import RouterMetrics


@dataclass(frozen=True)
class Fleet:
    """Engines and routing state of the router, shared by all requests."""

    prefill: EnginePool
    decode: EnginePool
    metrics: RouterMetrics
    feedback: RoutingFeedback
    discard: Callable[[Slot, str], Awaitable[None]]
