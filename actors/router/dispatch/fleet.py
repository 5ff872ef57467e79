"""Engines and routing state of one model in a router."""

from dataclasses import dataclass

from actors.engine_pool.engines import EnginePool
from actors.router.routing_feedback import RoutingFeedback
from actors.telemetry.router_metrics import RouterMetrics


@dataclass(frozen=True)
class Fleet:
    """Engines and routing state of one model, shared by all its requests."""

    prefill: EnginePool
    decode: EnginePool
    metrics: RouterMetrics
    feedback: RoutingFeedback
